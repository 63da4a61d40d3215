// Checks the arguments of operators that rotate heads, and finds their strides, without a copy where possible.
#pragma once

#include "kernel_pytorch/operator.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {

// A tensor `(..., S, H, D)`: tokens, heads of a token, columns of a head.
struct Heads {
  Tensor tensor;
  int64_t tokens;
  int64_t heads;
  int64_t columns;
  HeadStrides strides;
};

// Returns whether one stride, written to `stride`, walks all dimensions before the heads, whose stride may be any.
inline bool has_token_stride(const Tensor& tensor, int64_t* stride) {
  *stride = 0;
  if (tensor.size(tensor.dim() - 1) > 1 && tensor.stride(tensor.dim() - 1) != 1) return false;
  bool found = false;
  int64_t next = 0;
  for (int64_t i = tensor.dim() - 3; i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    if (!found) *stride = tensor.stride(i);
    if (found && tensor.stride(i) != next) return false;
    found = true;
    next = tensor.stride(i) * tensor.size(i);
  }
  return true;
}

inline Heads heads_of(const char* name, const Tensor& given) {
  check_floating(name, given);
  check(given.dim() >= 3, name, ": shape is ", shape(given), "; it needs at least three dimensions, (..., S, H, D)");
  const int64_t last = given.dim() - 1;
  check(given.size(last) > 0 && given.size(last - 1) > 0, name, ": shape is ", shape(given),
        "; heads and columns must not be empty");
  // CUDA kernels count heads and columns, and twice the columns, in 32 bits.
  constexpr int64_t kMostColumns = int64_t{1} << 29, kMostHeads = (int64_t{1} << 31) - 4096;
  check(!given.is_cuda() || (given.size(last) <= kMostColumns && given.size(last - 1) <= kMostHeads), name,
        ": shape is ", shape(given), "; on CUDA at most ", kMostHeads, " heads of at most ", kMostColumns,
        " columns are allowed");
  int64_t stride = 0;
  const bool as_it_is = has_token_stride(given, &stride);
  const Tensor tensor = as_it_is ? given : torch::stable::contiguous(given);
  const int64_t heads = tensor.size(last - 1), columns = tensor.size(last);
  const HeadStrides strides = as_it_is ? HeadStrides{stride, heads == 1 ? 0 : tensor.stride(last - 1)} : HeadStrides{heads * columns, columns};
  return {tensor, tensor.numel() / (heads * columns), heads, columns, strides};
}

// Arguments of a rotation, with the tensors that hold its data and must live as long as it.
struct RotationTensors {
  Tensor cos;
  Tensor sin;
  Rotation rotation;
};

// Converts cos and sin for x `(..., S, H, D)`: their shape is `(S, R / 2)`, or also has the dimensions of x before S.
inline RotationTensors rotation_of(const char* operator_name, const Tensor& cos_given, const Tensor& sin_given,
                                   const Heads& x, bool interleaved, bool transposed) {
  const DType type = dtype_of("x", x.tensor);
  const int64_t before = x.tensor.dim() - 2;
  for (const auto& [name, table] : {std::pair{"cos", &cos_given}, std::pair{"sin", &sin_given}}) {
    check_beside(name, *table, x.tensor);
    check_floating(name, *table);
    bool fits = table->dim() == 2 || table->dim() == before + 1;
    for (int64_t i = 2; fits && i <= table->dim(); ++i) {
      fits = table->size(table->dim() - i) == x.tensor.size(x.tensor.dim() - 1 - i);
    }
    check(fits, operator_name, ": ", name, ": shape is ", shape(*table), "; it must be (S, R/2), or (..., S, R/2) of x ",
          shape(x.tensor), " = (..., S, H, D)");
  }
  const int64_t pairs = cos_given.size(cos_given.dim() - 1);
  check(sizes(cos_given) == sizes(sin_given), operator_name, ": sin: shape is ", shape(sin_given),
        "; it must be that of cos, ", shape(cos_given));
  check(pairs > 0 && 2 * pairs <= x.columns, operator_name, ": cos: shape is ", shape(cos_given), "; its last dimension",
        " is half of what is rotated of a head, from 1 to D/2 = ", x.columns / 2);
  // Keep the dtype if the kernels support it together with that of x, else convert to the computation dtype.
  const DType given = dtype_of("cos", cos_given);
  const bool taken = given == dtype_of("sin", sin_given) && (given == type || given == compute_type({type}));
  const DType wanted = taken ? given : compute_type({type});
  RotationTensors found{as_contiguous(in_type(cos_given, wanted)), as_contiguous(in_type(sin_given, wanted)), {}};
  const int64_t rows = found.cos.numel() / pairs;
  found.rotation = {input("cos", found.cos), input("sin", found.sin), larger(1, rows), pairs, interleaved, transposed};
  return found;
}

}  // namespace kernel_pytorch
