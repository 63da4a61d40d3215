// Operator kernel_pytorch_cuda::flash_attention: schema, checks, allocation, threads.

#include "flash_attention.h"
#include "kernel_pytorch/operator.h"

namespace kernel_pytorch {
namespace flash_attention {

namespace {

void check_keys(const char* argument, const Tensor& tensor, const Tensor& q) {
  const char* const name = "flash_attention";
  check_beside(argument, tensor, q);
  check(dtype_of(argument, tensor) == dtype_of("q", q), name, ": ", argument, ": dtype is ",
        dtype_name(tensor), "; it must be that of q, ", dtype_name(q));
  check(tensor.dim() == 4 && tensor.size(0) == q.size(0) && tensor.size(3) == q.size(3), name, ": ", argument,
        ": shape is ", shape(tensor), "; for q of shape ", shape(q), " it must be (", q.size(0), ", kv_heads, keys, ",
        q.size(3), ")");
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& q_given, const Tensor& k_given, const Tensor& v_given,
                                           double scale, bool causal) {
  const char* const name = "flash_attention";
  check_floating("q", q_given);
  check(q_given.dim() == 4, name, ": q: shape is ", shape(q_given), "; it must be (batch, heads, queries, depth)");
  check(q_given.size(3) > 0, name, ": q: shape is ", shape(q_given), "; the last dimension must not be empty");
  check(!q_given.is_cuda() || (q_given.size(3) <= kMostDepth && q_given.size(1) <= kMostHeads), name,
        ": q: shape is ", shape(q_given), "; on CUDA at most ", kMostHeads, " heads of a depth of at most ", kMostDepth,
        " are allowed");
  check_keys("k", k_given, q_given);
  check_keys("v", v_given, q_given);
  check(sizes(v_given) == sizes(k_given), name, ": v: shape is ", shape(v_given), "; it must be that of k, ",
        shape(k_given));
  check(k_given.size(1) > 0 && q_given.size(1) % k_given.size(1) == 0, name, ": k: ", k_given.size(1),
        " heads do not divide the ", q_given.size(1), " heads of q");
  const Tensor q = as_contiguous(q_given), k = as_contiguous(k_given), v = as_contiguous(v_given);
  const Tensor o = empty(q, sizes(q), dtype_of("q", q));
  const Tensor lse = empty(q, {q.size(0), q.size(1), q.size(2)}, compute_type({dtype_of("q", q)}));

  Forward forward{};
  forward.q = input("q", q);
  forward.k = input("k", k);
  forward.v = input("v", v);
  forward.o = output(o);
  forward.lse = output(lse);
  forward.batch = q.size(0);
  forward.heads = q.size(1);
  forward.kv_heads = k.size(1);
  forward.queries = q.size(2);
  forward.keys = k.size(2);
  forward.depth = q.size(3);
  forward.scale = scale;
  forward.causal = causal;
  if (q.is_cuda()) {
    on_cuda(name, q, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    const int64_t tasks = forward.batch * forward.heads * ceil_divide(forward.queries, kTaskQueries);
    for_rows(tasks, kGrain, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return {o, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "flash_attention(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor o, Tensor lse)");
}

KP_IMPLEMENT(library) { library.impl("flash_attention", TORCH_BOX(&flash_attention)); }

}  // namespace flash_attention
}  // namespace kernel_pytorch
