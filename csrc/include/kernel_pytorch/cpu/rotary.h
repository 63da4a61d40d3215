// Vectorized rotation of a head, for files that are compiled once for every instruction set (isa.h).
#pragma once

#include "kernel_pytorch/cpu/buffer.h"
#include "kernel_pytorch/cpu/types.h"
#include "kernel_pytorch/rotary.h"

namespace kernel_pytorch {
namespace {

// Swaps neighbouring elements: 1 0 3 2 5 4 ...
inline Vector<float> swap_neighbours(Vector<float> values) {
  typedef uint64_t Twos __attribute__((vector_size(kVectorBytes)));
  const Twos twos = bit_cast<Twos>(values);
  return bit_cast<Vector<float>>((twos << 32) | (twos >> 32));
}

inline Vector<double> swap_neighbours(Vector<double> values) {
  Vector<double> swapped;
  for (int i = 0; i < kLanes<double>; i += 2) {
    swapped[i] = values[i + 1];
    swapped[i + 1] = values[i];
  }
  return swapped;
}

// cos and sin of one token, converted once for all of its heads and stored in the order in which `rotate` reads them.
// If interleaved, there is one value for each column, and sin has the sign of its column.
template <typename Compute>
class Angles {
 public:
  explicit Angles(const Rotation& rotation) : rotation_(rotation), numbers_(4 * rotation.pairs + 1) {}

  void move_to(int64_t token) {
    const int64_t offset = row_offset(token % rotation_.rows, rotation_.pairs);
    with_type(rotation_.cos.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if constexpr (std::is_same_v<ComputeFor<T>, Compute>) {
        lay_out(static_cast<const T*>(rotation_.cos.data) + offset, static_cast<const T*>(rotation_.sin.data) + offset);
      }
    });
  }

  // Writes a rotated head to y; `value(column, lanes)` reads the columns of the head.
  template <typename Value, typename Y>
  void rotate(int64_t columns, const Value& value, Y* y) const {
    const int64_t pairs = rotation_.pairs;
    const Compute* cos = numbers_.data();
    const Compute* sin = cos + 2 * pairs;
    if (rotation_.interleaved) {
      for_vectors<Compute>(2 * pairs, [&](int64_t column, auto lanes) {
        const Vector<Compute> own = value(column, lanes);
        store(y + column, own * load(cos + column, lanes) + swap_neighbours(own) * load(sin + column, lanes), lanes);
      });
    } else {
      for_vectors<Compute>(pairs, [&](int64_t column, auto lanes) {
        const Vector<Compute> first = value(column, lanes), second = value(pairs + column, lanes);
        const Vector<Compute> c = load(cos + column, lanes), s = load(sin + column, lanes);
        store(y + column, first * c - second * s, lanes);
        store(y + pairs + column, second * c + first * s, lanes);
      });
    }
    for_vectors<Compute>(columns - 2 * pairs, [&](int64_t column, auto lanes) {
      store(y + 2 * pairs + column, value(2 * pairs + column, lanes), lanes);
    });
  }

 private:
  template <typename T>
  void lay_out(const T* cos, const T* sin) {
    const int64_t pairs = rotation_.pairs;
    Compute* cosines = numbers_.data();
    Compute* sines = cosines + 2 * pairs;
    const Compute sign = rotation_.transposed ? Compute{-1} : Compute{1};
    for_vectors<Compute>(pairs, [&](int64_t pair, auto lanes) {
      store(cosines + pair, load(cos + pair, lanes), lanes);
      store(sines + pair, load(sin + pair, lanes) * sign, lanes);
    });
    if (!rotation_.interleaved) return;
    for (int64_t pair = pairs - 1; pair >= 0; --pair) {
      const Compute c = cosines[pair], s = sines[pair];
      cosines[2 * pair] = cosines[2 * pair + 1] = c;
      sines[2 * pair] = -s;
      sines[2 * pair + 1] = s;
    }
  }

  const Rotation rotation_;
  const Buffer<Compute> numbers_;
};

}  // namespace
}  // namespace kernel_pytorch
