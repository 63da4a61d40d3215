#include "kernel_pytorch/operator.h"

#include <dlfcn.h>

#include "kernel_pytorch/cuda/error.h"

namespace kernel_pytorch {

namespace {

// torch exports the current stream from its CUDA library, which a CPU build of torch does not have.
void* current_stream(int32_t device) {
  using Function = int (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  check(function != nullptr && function(device, &stream) == 0, "this torch has no CUDA");
  return stream;
}

}  // namespace

OnDeviceOf::OnDeviceOf(const Tensor& tensor)
    : guard_(tensor.get_device()), stream_(current_stream(tensor.get_device())) {}

#if defined(KP_WITH_CUDA)
void check_launch(int error, const char* name, const Tensor& x) {
  check(error == 0, name, ": CUDA could not launch the kernel for a tensor of shape ", shape(x), ": ", error_text(error));
}
#endif

}  // namespace kernel_pytorch
