// Operators kernel_pytorch_cuda::{qk_norm_rope, qk_norm_rope_backward}: schemas, checks, allocation, threads.

#include "kernel_pytorch/heads.h"
#include "qk_norm_rope.h"

namespace kernel_pytorch {
namespace qk_norm_rope {

namespace {

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Checks that shape and dtype of k match those of q, except for the number of heads.
void check_k(const char* name, const Heads& q, const Heads& k) {
  check_beside("k", k.tensor, q.tensor);
  bool fits = k.tensor.dim() == q.tensor.dim() && k.columns == q.columns;
  for (int64_t i = 0; fits && i < q.tensor.dim() - 2; ++i) fits = k.tensor.size(i) == q.tensor.size(i);
  check(fits, name, ": k: shape is ", shape(k.tensor), "; it must be that of q, ", shape(q.tensor),
        ", but for the number of heads, the last dimension but one");
  check(dtype_of("k", k.tensor) == dtype_of("q", q.tensor), name, ": k: dtype is ", dtype_name(k.tensor),
        "; it must be that of q, ", dtype_name(q.tensor));
}

// Weights in dtypes that the kernels support; on CUDA both in the dtype of q or both in the computation dtype.
struct Weights {
  Tensor q;
  Tensor k;
};

Weights weights_beside(const char* name, const Tensor& q_weight, const Tensor& k_weight, const Heads& q) {
  const DType type = dtype_of("q", q.tensor), compute = compute_type({type});
  bool taken = true;
  for (const auto& [argument, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}}) {
    check_beside(argument, *weight, q.tensor);
    check_floating(argument, *weight);
    check(weight->dim() == 1 && weight->size(0) == q.columns, name, ": ", argument, ": shape is ", shape(*weight),
          "; it must be (D,) of q ", shape(q.tensor), " = (..., S, H, D)");
    const DType given = dtype_of(argument, *weight);
    taken = taken && (given == type || (!q.tensor.is_cuda() && compute_type({given}) == compute));
  }
  return taken ? Weights{as_contiguous(q_weight), as_contiguous(k_weight)}
               : Weights{as_contiguous(in_type(q_weight, compute)), as_contiguous(in_type(k_weight, compute))};
}

Tensor empty_rstd(const Heads& x) {
  std::vector<int64_t> size = sizes(x.tensor);
  size.pop_back();
  return empty(x.tensor, size, compute_type({dtype_of("q", x.tensor)}));
}

Four forward_operator(const Tensor& q_given, const Tensor& k_given, const Tensor& q_weight, const Tensor& k_weight,
                      const Tensor& cos, const Tensor& sin, double eps, bool interleaved,
                      double offset) {
  const char* const name = "qk_norm_rope";
  const Heads heads[2] = {heads_of("q", q_given), heads_of("k", k_given)};
  const Heads& q = heads[0];
  check_k(name, q, heads[1]);
  const Weights weights = weights_beside(name, q_weight, k_weight, q);
  const RotationTensors tables = rotation_of(name, cos, sin, q, interleaved, false);
  const DType type = dtype_of("q", q.tensor);
  const Tensor ys[2] = {empty(q.tensor, sizes(q.tensor), type), empty(q.tensor, sizes(heads[1].tensor), type)};
  const Tensor rstds[2] = {empty_rstd(q), empty_rstd(heads[1])};
  Forward forward{};
  for (int i = 0; i < 2; ++i) {
    ForwardSide& side = forward.sides[i];
    side = {input("q", heads[i].tensor), input("weight", i == 0 ? weights.q : weights.k), output(ys[i]), output(rstds[i]), heads[i].strides,
            heads[i].heads};
  }
  forward.rotation = tables.rotation;
  forward.tokens = q.tokens;
  forward.columns = q.columns;
  forward.eps = eps;
  forward.offset = offset;
  if (q.tensor.is_cuda()) {
    on_cuda(name, q.tensor, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    const int64_t elements = (q.heads + heads[1].heads) * q.columns;
    for_rows(q.tokens, elements, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return {ys[0], ys[1], rstds[0], rstds[1]};
}

// Number of partial sums of the weights' gradients: on the CPU each covers about 64 heads; on CUDA there is one for
// each block that a large GPU runs at once (two on each of 132 multiprocessors), with at least 64 heads.
int64_t parts_of(const Heads& q, const Heads& k) {
  const int64_t heads = larger(q.heads, k.heads);
  const int64_t parts = larger(1, smaller(q.tokens, ceil_divide(q.tokens * heads, 64)));
  return q.tensor.is_cuda() ? smaller(parts, 264) : parts;
}

void check_incoming(const char* name, const char* argument, const OptionalTensor& dy, const Heads& x) {
  if (!dy.has_value()) return;
  check_beside(argument, *dy, x.tensor);
  check_floating(argument, *dy);
  check(sizes(*dy) == sizes(x.tensor), name, ": ", argument, ": shape is ", shape(*dy), "; it must be ", shape(x.tensor));
}

void check_rstd(const char* name, const char* argument, const Tensor& rstd, const Heads& x) {
  check_beside(argument, rstd, x.tensor);
  check(rstd.numel() == x.tokens * x.heads, name, ": ", argument, ": shape is ", shape(rstd),
        "; it needs one number a head of ", shape(x.tensor));
  check(dtype_of(argument, rstd) == compute_type({dtype_of("q", x.tensor)}), name, ": ", argument,
        ": dtype is not the one that q is computed in");
}

struct BackwardTensors {
  OptionalTensor dy;
  Tensor weight;
  Tensor rstd;
  Tensor dx;
  Tensor dweight;
};

BackwardTensors side_of(const OptionalTensor& dy, const Heads& x, const Tensor& weight, const Tensor& rstd, bool need_dx,
                        bool need_dweight) {
  const DType type = dtype_of("q", x.tensor);
  const auto size_if = [](bool needed, const Tensor& like) { return needed ? sizes(like) : std::vector<int64_t>{0}; };
  return {dy.has_value() ? OptionalTensor(in_type(*dy, type)) : std::nullopt, weight, as_contiguous(rstd),
          empty(x.tensor, size_if(need_dx, x.tensor), type),
          empty(x.tensor, size_if(need_dweight, weight), dtype_of("weight", weight))};
}

void run_backward(const char* name, const Backward& backward, const Heads& q, const Heads& k) {
  if (q.tensor.is_cuda()) return on_cuda(name, q.tensor, [&](auto stream) { return launch_backward(backward, stream); });
  const auto kernel = KP_BEST(backward);
  const auto sum = KP_BEST(add_shares);
  const int64_t elements = ceil_divide(q.tokens, backward.parts) * (q.heads + k.heads) * q.columns;
  for_rows(backward.parts, elements, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
  if (backward.sides[0].dweight || backward.sides[1].dweight) {
    for_rows(q.columns, backward.parts, [&](int64_t begin, int64_t end) { sum(backward, begin, end); });
  }
}

Four backward_operator(const OptionalTensor& dq_out, const OptionalTensor& dk_out, const Tensor& q_given,
                       const Tensor& k_given, const Tensor& q_weight, const Tensor& k_weight, const Tensor& cos,
                       const Tensor& sin, const Tensor& q_rstd, const Tensor& k_rstd, double, bool interleaved,
                       double offset, bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight) {
  const char* const name = "qk_norm_rope_backward";
  const Heads heads[2] = {heads_of("q", q_given), heads_of("k", k_given)};
  const Heads& q = heads[0];
  check_k(name, q, heads[1]);
  check_incoming(name, "dq_out", dq_out, q);
  check_incoming(name, "dk_out", dk_out, heads[1]);
  check_rstd(name, "q_rstd", q_rstd, q);
  check_rstd(name, "k_rstd", k_rstd, heads[1]);
  check(dq_out.has_value() || !(need_dq || need_dq_weight), name, ": dq_out: is None; gradients of q need it");
  check(dk_out.has_value() || !(need_dk || need_dk_weight), name, ": dk_out: is None; gradients of k need it");
  const RotationTensors tables = rotation_of(name, cos, sin, q, interleaved, true);
  const bool need_weights[2] = {need_dq_weight, need_dk_weight};
  const bool need_inputs[2] = {need_dq, need_dk};
  const Weights weights = weights_beside(name, q_weight, k_weight, q);
  const BackwardTensors tensors[2] = {side_of(dq_out, q, weights.q, q_rstd, need_dq, need_dq_weight),
                                      side_of(dk_out, heads[1], weights.k, k_rstd, need_dk, need_dk_weight)};
  Backward backward{};
  std::vector<Heads> incoming;  // keeps the inputs alive until the kernels are launched
  for (int i = 0; i < 2; ++i) {
    if (!need_inputs[i] && !need_weights[i]) continue;
    incoming.push_back(heads_of("dy", *tensors[i].dy));
    BackwardSide& side = backward.sides[i];
    side.dy = input("dy", incoming.back().tensor);
    side.x = input("q", heads[i].tensor);
    side.weight = input("weight", tensors[i].weight);
    side.rstd = input("rstd", tensors[i].rstd);
    if (need_inputs[i]) side.dx = output(tensors[i].dx);
    if (need_weights[i]) side.dweight = output(tensors[i].dweight);
    side.dy_strides = incoming.back().strides;
    side.strides = heads[i].strides;
    side.heads = heads[i].heads;
  }
  backward.sides[0].x.dtype = dtype_of("q", q.tensor);
  backward.rotation = tables.rotation;
  backward.tokens = q.tokens;
  backward.columns = q.columns;
  backward.parts = parts_of(q, heads[1]);
  backward.offset = offset;
  const bool sums = need_dq_weight || need_dk_weight;
  const Tensor shares =
      empty(q.tensor, {sums ? 2 * backward.parts * q.columns : 0}, compute_type({dtype_of("q", q.tensor)}));
  if (sums) backward.shares = output(shares);
  run_backward(name, backward, q, heads[1]);
  return {tensors[0].dx, tensors[1].dx, in_type(tensors[0].dweight, dtype_of("q_weight", q_weight)),
          in_type(tensors[1].dweight, dtype_of("k_weight", k_weight))};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps,"
      " bool interleaved, float offset)"
      " -> (Tensor q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)");
  library.def(
      "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight,"
      " Tensor cos, Tensor sin, Tensor q_rstd, Tensor k_rstd, float eps, bool interleaved, float offset, bool need_dq,"
      " bool need_dk, bool need_dq_weight, bool need_dk_weight)"
      " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)");
}

KP_IMPLEMENT(library) {
  library.impl("qk_norm_rope", TORCH_BOX(&forward_operator));
  library.impl("qk_norm_rope_backward", TORCH_BOX(&backward_operator));
}

}  // namespace qk_norm_rope
}  // namespace kernel_pytorch
