// Operators kernel_pytorch_cuda::{cross_entropy, cross_entropy_backward, cross_entropy_backward_}: schemas, checks,
// allocation, threads.

#include "cross_entropy.h"
#include "kernel_pytorch/operator.h"

namespace kernel_pytorch {
namespace cross_entropy {

namespace {

// Converts targets to contiguous int64; int32 targets are small compared with the logits.
Tensor targets_of(const char* name, const Tensor& target, const Tensor& logits) {
  check_beside("target", target, logits);
  const ScalarType type = target.scalar_type();
  check(type == ScalarType::Long || type == ScalarType::Int, name, ": target: allowed dtypes are int64 and int32");
  std::vector<int64_t> expected = sizes(logits);
  expected.pop_back();
  check(sizes(target) == expected, name, ": target: shape is ", shape(target), "; it must be that of logits, ",
        shape(logits), ", without the last dimension");
  return as_contiguous(type == ScalarType::Long ? target : torch::stable::to(target, ScalarType::Long));
}

Options options_of(const char* name, int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  check(label_smoothing >= 0.0 && label_smoothing <= 1.0, name, ": label_smoothing: given ", label_smoothing,
        "; allowed is from 0 to 1");
  check(z_loss >= 0.0, name, ": z_loss: given ", z_loss, "; it must not be negative");
  check(softcap >= 0.0, name, ": softcap: given ", softcap, "; it must be positive, or 0 for none");
  return {ignore_index, label_smoothing, z_loss, softcap};
}

// Shape of the normalizer: most and log_sum of each row.
std::vector<int64_t> normalizer_sizes(const Tensor& target) {
  std::vector<int64_t> found = sizes(target);
  found.push_back(2);
  return found;
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits_given, const Tensor& target_given, int64_t ignore_index,
                                         double label_smoothing, double z_loss, double softcap) {
  const char* const name = "cross_entropy";
  const Rows rows = rows_of("logits", logits_given);
  check_floating("logits", logits_given);
  const Tensor logits = as_contiguous(logits_given);
  const Tensor target = targets_of(name, target_given, logits);
  const DType compute = compute_type({dtype_of("logits", logits)});
  const Tensor loss = empty(logits, sizes(target), compute);
  const Tensor normalizer = empty(logits, normalizer_sizes(target), compute);

  Forward forward{};
  forward.logits = input("logits", logits);
  forward.target = static_cast<const int64_t*>(data_of("target", target));
  forward.loss = output(loss);
  forward.normalizer = output(normalizer);
  forward.rows = rows.rows;
  forward.columns = rows.columns;
  forward.options = options_of(name, ignore_index, label_smoothing, z_loss, softcap);
  if (logits.is_cuda()) {
    on_cuda(name, logits, [&](auto stream) { return launch_forward(forward, rung(), stream); });
  } else {
    const auto kernel = KP_BEST(forward);
    for_rows(rows.rows, rows.columns, [&](int64_t begin, int64_t end) { kernel(forward, begin, end); });
  }
  return {loss, normalizer};
}

// Writes the gradient of logits to a contiguous tensor, which may be the logits themselves.
void write_gradient(const char* name, const Tensor& dloss_given, const Tensor& normalizer_given, const Tensor& logits,
                    const Tensor& target_given, const Options& options, const Tensor& dlogits) {
  const Rows rows = rows_of("logits", logits);
  const Tensor target = targets_of(name, target_given, logits);
  const DType compute = compute_type({dtype_of("logits", logits)});
  const Tensor dloss = as_contiguous(dloss_given), normalizer = as_contiguous(normalizer_given);
  check(sizes(dloss) == sizes(target) && dtype_of("dloss", dloss) == compute, name,
        ": dloss: shape is ", shape(dloss), "; it must be that of target, in the dtype of the loss");
  check(sizes(normalizer) == normalizer_sizes(target) && dtype_of("normalizer", normalizer) == compute, name,
        ": normalizer: shape is ", shape(normalizer), "; it must be that of target and 2, in the dtype of the loss");
  check_beside("dloss", dloss, logits);
  check_beside("normalizer", normalizer, logits);

  Backward backward{};
  backward.dloss = input("dloss", dloss);
  backward.normalizer = input("normalizer", normalizer);
  backward.logits = input("logits", logits);
  backward.target = static_cast<const int64_t*>(data_of("target", target));
  backward.dlogits = output(dlogits);
  backward.rows = rows.rows;
  backward.columns = rows.columns;
  backward.options = options;
  if (logits.is_cuda()) {
    on_cuda(name, logits, [&](auto stream) { return launch_backward(backward, stream); });
  } else {
    const auto kernel = KP_BEST(backward);
    for_rows(rows.rows, rows.columns, [&](int64_t begin, int64_t end) { kernel(backward, begin, end); });
  }
}

Tensor cross_entropy_backward(const Tensor& dloss, const Tensor& normalizer, const Tensor& logits_given, const Tensor& target,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  const char* const name = "cross_entropy_backward";
  check_floating("logits", logits_given);
  const Tensor logits = as_contiguous(logits_given);
  const Options options = options_of(name, ignore_index, label_smoothing, z_loss, softcap);
  const Tensor dlogits = empty(logits, sizes(logits), dtype_of("logits", logits));
  write_gradient(name, dloss, normalizer, logits, target, options, dlogits);
  return dlogits;
}

void cross_entropy_backward_(const Tensor& dloss, const Tensor& normalizer, Tensor logits, const Tensor& target,
                             int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  const char* const name = "cross_entropy_backward_";
  check_floating("logits", logits);
  check(logits.is_contiguous(), name, ": logits: must be contiguous to be written over");
  const Options options = options_of(name, ignore_index, label_smoothing, z_loss, softcap);
  write_gradient(name, dloss, normalizer, logits, target, options, logits);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch_cuda, library) {
  library.def(
      "cross_entropy(Tensor logits, Tensor target, SymInt ignore_index, float label_smoothing, float z_loss,"
      " float softcap) -> (Tensor loss, Tensor normalizer)");
  library.def(
      "cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor logits, Tensor target, SymInt ignore_index,"
      " float label_smoothing, float z_loss, float softcap) -> Tensor");
  library.def(
      "cross_entropy_backward_(Tensor dloss, Tensor normalizer, Tensor(a!) logits, Tensor target, SymInt ignore_index,"
      " float label_smoothing, float z_loss, float softcap) -> ()");
}

KP_IMPLEMENT(library) {
  library.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  library.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  library.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}

}  // namespace cross_entropy
}  // namespace kernel_pytorch
