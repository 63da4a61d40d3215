#include <cuda_runtime.h>

#include "kernel_pytorch/cuda/error.h"

namespace kernel_pytorch {

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace kernel_pytorch
