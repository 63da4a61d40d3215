// CUDA's description of an error code, for code that is compiled without CUDA's headers.
#pragma once

namespace kernel_pytorch {

const char* error_text(int error);

}  // namespace kernel_pytorch
