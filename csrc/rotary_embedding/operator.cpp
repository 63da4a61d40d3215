// The operator kernel_pytorch_cuda::rotary_embedding: schema, checks, allocation, threads.

#include "kernel_pytorch/heads.h"
#include "rotary_embedding.h"

namespace kernel_pytorch {
namespace rotary_embedding {

namespace {

Tensor rotary_embedding(const Tensor& x_given, const Tensor& cos, const Tensor& sin, bool interleaved, bool transposed) {
  const char* const name = "rotary_embedding";
  const Heads x = heads_of("x", x_given);
  const RotationTensors tables = rotation_of(name, cos, sin, x, interleaved, transposed);
  const Tensor y = empty(x.tensor, sizes(x.tensor), dtype_of("x", x.tensor));
  Arguments arguments{};
  arguments.x = input("x", x.tensor);
  arguments.y = output(y);
  arguments.rotation = tables.rotation;
  arguments.strides = x.strides;
  arguments.tokens = x.tokens;
  arguments.heads = x.heads;
  arguments.columns = x.columns;
  if (y.is_cuda()) {
    on_cuda(name, y, [&](auto stream) { return launch(arguments, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(rotate);
    for_rows(x.tokens, x.heads * x.columns, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed=False)"
      " -> Tensor");
}

KP_IMPLEMENT(library) { library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding)); }

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
