// Replaces csrc/operator.cpp: tensors on the CPU are treated as tensors on the emulated GPU.
#include "kernel_pytorch/operator.h"

#include "kernel_pytorch/cuda/error.h"

namespace kernel_pytorch {

OnDeviceOf::OnDeviceOf(const Tensor&) {}

void check_launch(int error, const char* name, const Tensor& x) {
  check(error == 0, name, ": CUDA could not launch the kernel for a tensor of shape ", shape(x), ": ", error_text(error));
}

}  // namespace kernel_pytorch
