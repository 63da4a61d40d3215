// Operators kernel_pytorch_cuda::{rotary_embedding, rotary_qk}: schemas, checks, allocation, threads.

#include "kernel_pytorch/heads.h"
#include "rotary_embedding.h"

namespace kernel_pytorch {
namespace rotary_embedding {

namespace {

Side side_of(const char* name, const Heads& x, const Tensor& y) {
  return {input(name, x.tensor), output(y), x.strides, x.heads};
}

void run(const char* name, const Arguments& arguments, const Tensor& x) {
  if (x.is_cuda()) return on_cuda(name, x, [&](auto stream) { return launch(arguments, rung(), stream); });
  const auto kernel = KP_BEST(rotate);
  const int64_t heads = arguments.sides[0].heads + arguments.sides[1].heads;
  for_rows(arguments.tokens, heads * arguments.columns, [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

Tensor rotary_embedding(const Tensor& x_given, const Tensor& cos, const Tensor& sin, bool interleaved, bool transposed) {
  const char* const name = "rotary_embedding";
  const Heads x = heads_of("x", x_given);
  const RotationTensors tables = rotation_of(name, cos, sin, x, interleaved, transposed);
  const Tensor y = empty(x.tensor, sizes(x.tensor), dtype_of("x", x.tensor));
  Arguments arguments{};
  arguments.sides[0] = side_of("x", x, y);
  arguments.rotation = tables.rotation;
  arguments.tokens = x.tokens;
  arguments.columns = x.columns;
  run(name, arguments, x.tensor);
  return y;
}

// Checks that shape and dtype of k match those of q, except for the number of heads.
void check_k(const char* name, const Heads& q, const Heads& k) {
  check_beside("k", k.tensor, q.tensor);
  std::vector<int64_t> expected = sizes(q.tensor);
  expected[expected.size() - 2] = k.heads;
  check(sizes(k.tensor) == expected, name, ": k: shape is ", shape(k.tensor), "; it must be that of q, ",
        shape(q.tensor), ", but for the number of heads, the last dimension but one");
  check(dtype_of("k", k.tensor) == dtype_of("q", q.tensor), name, ": k: dtype is ", dtype_name(k.tensor),
        "; it must be that of q, ", dtype_name(q.tensor));
}

// Position ids for the kernels, with the tensor that must live until they are launched.
struct PositionTensor {
  Tensor tensor;
  Positions positions;
};

// Whether all sequences share one contiguous vector of positions, as in an expanded tensor.
bool is_shared(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  bool shared = tensor.size(last) <= 1 || tensor.stride(last) == 1;
  for (int64_t i = 0; i < last; ++i) shared = shared && (tensor.size(i) == 1 || tensor.stride(i) == 0);
  return shared;
}

PositionTensor positions_of(const char* name, const Tensor& given, const Heads& x) {
  check_beside("position_ids", given, x.tensor);
  const ScalarType type = given.scalar_type();
  check(type == ScalarType::Long || type == ScalarType::Int, name, ": position_ids: allowed dtypes are int64 and int32");
  std::vector<int64_t> tokens = sizes(x.tensor);
  tokens.resize(tokens.size() - 2);
  check(sizes(given) == tokens || sizes(given) == std::vector<int64_t>{tokens.back()}, name,
        ": position_ids: shape is ", shape(given), "; it must be (S,), or (..., S) of ", shape(x.tensor),
        " = (..., S, H, D)");
  const bool shared = is_shared(given);
  const Tensor tensor = shared ? given : as_contiguous(given);
  const int64_t count = shared ? tensor.size(tensor.dim() - 1) : tensor.numel();
  return {tensor, {data_of("position_ids", tensor), larger(1, count), type == ScalarType::Long}};
}

// Converts cos and sin `(P, R / 2)` that positions index; `rotation_of` takes tables with rows in the order of tokens.
RotationTensors rotation_at(const char* operator_name, const Tensor& cos_given, const Tensor& sin_given, const Heads& x,
                            bool interleaved, bool transposed) {
  for (const auto& [name, table] : {std::pair{"cos", &cos_given}, std::pair{"sin", &sin_given}}) {
    check_beside(name, *table, x.tensor);
    check_floating(name, *table);
    check(table->dim() == 2, operator_name, ": ", name, ": shape is ", shape(*table),
          "; with position_ids it must be (P, R/2)");
  }
  const int64_t rows = cos_given.size(0), pairs = cos_given.size(1);
  check(sizes(cos_given) == sizes(sin_given), operator_name, ": sin: shape is ", shape(sin_given),
        "; it must be that of cos, ", shape(cos_given));
  check(pairs > 0 && 2 * pairs <= x.columns, operator_name, ": cos: shape is ", shape(cos_given), "; its last dimension",
        " is half of what is rotated of a head, from 1 to D/2 = ", x.columns / 2);
  // Converted to the computation dtype only if the kernels do not support theirs: a conversion reads every row.
  const DType type = dtype_of("x", x.tensor), compute = compute_type({type}), given = dtype_of("cos", cos_given);
  const bool widened = given == type || given == compute || (!x.tensor.is_cuda() && compute_type({given}) == compute);
  const DType wanted = widened && given == dtype_of("sin", sin_given) ? given : compute;
  RotationTensors found{as_contiguous(in_type(cos_given, wanted)), as_contiguous(in_type(sin_given, wanted)), {}};
  found.rotation = {input("cos", found.cos), input("sin", found.sin), rows, pairs, interleaved, transposed};
  return found;
}

std::tuple<Tensor, Tensor> rotary_qk(const OptionalTensor& q_given, const OptionalTensor& k_given, const Tensor& cos,
                                     const Tensor& sin, const OptionalTensor& position_ids, bool interleaved,
                                     bool transposed) {
  const char* const name = "rotary_qk";
  check(q_given.has_value() || k_given.has_value(), name, ": q: given None, and k too; one of them must be a tensor");
  std::vector<Heads> given;  // keeps the inputs alive until the kernel is launched
  std::vector<Tensor> results;
  Arguments arguments{};
  for (const auto& [argument, tensor] : {std::pair{"q", &q_given}, std::pair{"k", &k_given}}) {
    if (!tensor->has_value()) {
      results.push_back(empty(cos, {0}, dtype_of("cos", cos)));
      continue;
    }
    given.push_back(heads_of(argument, **tensor));
    const Heads& x = given.back();
    if (given.size() == 2) check_k(name, given.front(), x);
    results.push_back(empty(x.tensor, sizes(x.tensor), dtype_of(argument, x.tensor)));
    arguments.sides[given.size() - 1] = side_of(argument, x, results.back());
  }
  const Heads& x = given.front();
  const bool has_positions = position_ids.has_value();
  const RotationTensors tables = has_positions ? rotation_at(name, cos, sin, x, interleaved, transposed)
                                               : rotation_of(name, cos, sin, x, interleaved, transposed);
  const std::optional<PositionTensor> positions =
      has_positions ? std::optional(positions_of(name, *position_ids, x)) : std::nullopt;
  arguments.rotation = tables.rotation;
  if (has_positions) arguments.positions = positions->positions;
  arguments.tokens = x.tokens;
  arguments.columns = x.columns;
  run(name, arguments, x.tensor);
  return {results[0], results[1]};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed=False)"
      " -> Tensor");
  library.def(
      "rotary_qk(Tensor? q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved, bool transposed)"
      " -> (Tensor q_out, Tensor k_out)");
}

KP_IMPLEMENT(library) {
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  library.impl("rotary_qk", TORCH_BOX(&rotary_qk));
}

}  // namespace rotary_embedding
}  // namespace kernel_pytorch
