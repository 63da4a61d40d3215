// Errors that report failed allocations and failed calls of PyTorch.
#include <dlfcn.h>

#include "kernel_pytorch/cpu/buffer.h"
#include "kernel_pytorch/operator.h"

namespace kernel_pytorch {

namespace {

// Message of this thread's last failed call; empty before PyTorch 2.13, which writes it to its log instead.
std::string message_of_torch() {
  using Function = const char* (*)();
  static const Function function = [] {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? dlsym(library, "torch_exception_get_what_without_backtrace") : nullptr;
    return reinterpret_cast<Function>(found);
  }();
  const char* message = function != nullptr ? function() : nullptr;
  return message != nullptr ? message : "";
}

}  // namespace

void check_torch(int32_t code, const char* call) {
  if (code == TORCH_SUCCESS) return;
  const std::string message = message_of_torch();
  if (!message.empty()) fail(message);
  fail("PyTorch failed, and wrote the reason to standard error; the call was ", call);
}

void fail_to_allocate(int64_t bytes, bool cuda) {
  const std::string message = message_of_torch();
  if (!message.empty()) fail(message);
  if (cuda) fail("CUDA out of memory. Tried to allocate ", bytes, " bytes.");
  fail_to_allocate(bytes);
}

void fail_to_allocate(int64_t bytes) {
  fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
}

}  // namespace kernel_pytorch
