// In place of csrc/operator.cpp: tensors on the CPU are on the emulated card.
#include "kernel_pytorch/operator.h"

#include "kernel_pytorch/cuda/error.h"

namespace kernel_pytorch {

OnDeviceOf::OnDeviceOf(const Tensor&) {}

void check_launch(int error, const char* name, const Tensor& x) {
  check(error == 0, name, ": CUDA could not launch the kernel for a tensor of shape ", shape(x), ": ", error_text(error));
}

}  // namespace kernel_pytorch
