// Kernel 3's backward with an activation, dropout, or parameters of other types. It is limited by instruction issue,
// and half of the instructions were overhead per row. So each iteration, a turn, processes two vectors, of one row or
// of two, with one reduction; parameters are unpacked once; and the next turn is prefetched to shared memory instead of
// registers (cp.async, compute capability 8.0 on), which saves register copies and leaves room for more warps.
#pragma once

#include "kernel_pytorch/cuda/ring.cuh"
#include "kernel_pytorch/cuda/row_sums.cuh"
#include "kernel_pytorch/cuda/shared_memory.cuh"
#include "row_parts.cuh"

namespace kernel_pytorch {
namespace norm_act {

// Number of rows of a team in a turn; each sum is that of a separate reduction.
template <int kVectors>
constexpr int kRowsOfTurn = kVectors == 1 ? 2 : 1;

// Every warp has a separate part of shared memory, in lines of 16 bytes per lane. Each thread reads only what it has
// written itself, so no barrier is needed.
constexpr int kLineBytes = kWarp * 16;

// Parameters of a thread's vectors as float32; ones and zeros for missing ones.
template <int kVectors, int N>
class KeptParameters {
  static constexpr int kQuads = N / 4;

 public:
  static constexpr int kBytes = 2 * kVectors * kQuads * kLineBytes;  // per warp

  __device__ __forceinline__ explicit KeptParameters(uint32_t begin) : begin_(begin) {}

  template <Kind kKind, typename T>
  __device__ __forceinline__ void keep(const BackwardPointers<T>& p, int v, int column) const {
    float values[N];
    read<kKind, T>(p.weight, column, 1.0f, values);
    write(2 * v, values);
    read<kKind, T>(p.bias, column, 0.0f, values);
    write(2 * v + 1, values);
  }

  __device__ __forceinline__ void weight(int v, float (&values)[N]) const { look_up(2 * v, values); }
  __device__ __forceinline__ void bias(int v, float (&values)[N]) const { look_up(2 * v + 1, values); }

 private:
  template <Kind kKind, typename T>
  __device__ __forceinline__ static void read(const Input& source, int column, float none, float (&values)[N]) {
#pragma unroll
    for (float& value : values) value = none;
    if (source.data == nullptr) return;
    if constexpr (kKind == Kind::kAny) {
      load_as<N>(source, column, values);
    } else {
      load_vector<T, N>(static_cast<const T*>(source.data) + column, values);
    }
  }

  __device__ __forceinline__ uint32_t place_of(int parameter, int quad) const {
    return begin_ + (parameter * kQuads + quad) * kLineBytes;
  }
  __device__ __forceinline__ void write(int parameter, const float (&values)[N]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      uint4 words;
      memcpy(&words, values + 4 * quad, sizeof words);
      store_shared_16_bytes(place_of(parameter, quad), words);
    }
  }
  __device__ __forceinline__ void look_up(int parameter, float (&values)[N]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const uint4 words = load_shared_16_bytes(place_of(parameter, quad));
      memcpy(values + 4 * quad, &words, sizeof words);
    }
  }

  uint32_t begin_;
};

// Optional steps of a row, as bits of one register: testing a pointer would take three instructions each time.
enum Task : unsigned { kCentre = 1, kDropDy = 2, kAddDh = 4, kStoreDresidual = 8, kDropDx = 16, kStoreDx = 32 };
constexpr unsigned kRareTasks = kAddDh | kStoreDresidual | kDropDx, kRowTasks = kStoreDresidual | kStoreDx;

template <typename T>
__device__ __forceinline__ unsigned tasks_of(const BackwardPointers<T>& p) {
  const bool needs_x = p.dx.data != nullptr, needs_residual = p.dresidual.data != nullptr, drops = p.dropout.seed != nullptr;
  unsigned tasks = (p.mean != nullptr ? kCentre : 0) | (drops && !p.adds ? kDropDy : 0) |
                   (p.dh != nullptr && (needs_x || needs_residual) ? kAddDh : 0) |
                   (needs_residual ? kStoreDresidual : 0) | (drops && p.adds && needs_x ? kDropDx : 0) |
                   (needs_x ? kStoreDx : 0);
  asm volatile("" : "+r"(tasks));  // keeps the compiler from recomputing the bits from pointers
  return tasks;
}

// Rows of a team.
template <typename T, int kVectors>
struct TeamRows {
  unsigned first;
  unsigned step;           // to the next row
  int most;                // largest number of rows of a team of this block
  unsigned end[kVectors];  // the thread has this vector only in rows before this one

  __device__ __forceinline__ TeamRows(const BackwardPointers<T>& p, const Team<false>& team)
      : first(static_cast<unsigned>(team.index() + threadIdx.y * p.parts)),
        step(static_cast<unsigned>(p.parts) * blockDim.y),
        most(static_cast<int>(quotient(p.rows - team.index() + step - 1, step))) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool there = (v * team.stride() + team.first()) * kVectorLength<T> < p.columns;
      end[v] = there ? static_cast<unsigned>(p.rows) : 0;
    }
  }
};

// Returns the same position in another row, with one multiply-add. `pitch`: bytes per row.
template <typename T>
__device__ __forceinline__ T* down_to(T* place, unsigned row, unsigned pitch) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(place) + uint64_t{row} * pitch);
}

// The rows of two turns: the current one and the next one, which is prefetched.
template <typename T, int kVectors>
class IncomingTurns {
  static constexpr int N = kVectorLength<T>, kRows = kRowsOfTurn<kVectors>;
  enum Word { kH, kDy, kDh, kWords };
  static constexpr int kTurnBytes = kRows * kVectors * kWords * kLineBytes;

 public:
  static constexpr int kBytes = 2 * kTurnBytes;  // per warp

  __device__ __forceinline__ IncomingTurns(uint32_t begin, int column, int across)
      : at_(begin), both_(2 * begin + kTurnBytes), column_(column), across_(across) {}

  // Starts the copies for the turn that begins with this row.
  __device__ __forceinline__ void ask(const BackwardPointers<T>& p, const TeamRows<T, kVectors>& rows, unsigned row,
                                      unsigned tasks) {
    const unsigned pitch = p.columns * static_cast<unsigned>(sizeof(T));
    const auto ask_for = [&](Word word, const T* source) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const unsigned this_row = row + r * rows.step;
        const T* const place = down_to(source + column_, this_row, pitch);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          copy_16_bytes_once(place_of(both_ - at_, r, v, word), place + v * across_, this_row < rows.end[v]);
        }
      }
    };
    if (tasks & kAddDh) ask_for(kDh, p.dh);
    ask_for(kH, p.h);
    ask_for(kDy, p.dy);
    commit_copies();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const unsigned this_row = row + r * rows.step, last = static_cast<unsigned>(p.rows) - 1;
      const unsigned read = this_row < last ? this_row : last;
      if (tasks & kCentre) next_mean_[r] = p.mean[read];
      next_rstd_[r] = p.rstd[read];
    }
  }

  // Waits for the copies of the next turn, and makes it the current one.
  __device__ __forceinline__ void begin() {
    await_copies<0>();
    at_ = both_ - at_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean_[r] = next_mean_[r];
      rstd_[r] = next_rstd_[r];
    }
  }

  __device__ __forceinline__ float mean(int r) const { return mean_[r]; }
  __device__ __forceinline__ float rstd(int r) const { return rstd_[r]; }
  __device__ __forceinline__ void h(int r, int v, float (&values)[N]) const { read(r, v, kH, values); }
  __device__ __forceinline__ void dy(int r, int v, float (&values)[N]) const { read(r, v, kDy, values); }
  __device__ __forceinline__ void dh(int r, int v, float (&values)[N]) const { read(r, v, kDh, values); }

 private:
  __device__ __forceinline__ static uint32_t place_of(uint32_t turn, int r, int v, Word word) {
    return turn + ((r * kVectors + v) * kWords + word) * kLineBytes;
  }
  __device__ __forceinline__ void read(int r, int v, Word word, float (&values)[N]) const {
    Packed<T, N> packed;
    packed.words[0] = load_shared_16_bytes(place_of(at_, r, v, word));
    unpack(packed, values);
  }

  uint32_t at_;    // address of this thread's part of the current turn
  uint32_t both_;  // sum of that address and the next turn's
  int column_;     // of the thread's first vector
  int across_;     // distance to its next vector
  float mean_[kRows] = {};
  float rstd_[kRows] = {};
  float next_mean_[kRows] = {};
  float next_rstd_[kRows] = {};
};

// Computes the gradients of the rows of one part.
template <typename T, int kVectors, Kind kKind>
class ActivatedRows {
  static constexpr int N = kVectorLength<T>, kRows = kRowsOfTurn<kVectors>;
  using Turns = IncomingTurns<T, kVectors>;
  using Kept = KeptParameters<kVectors, N>;
  using Sums = RowSums<2 * kRows>;

 public:
  static constexpr int kBytes = Turns::kBytes + Kept::kBytes;  // dynamic shared memory per warp
  using Scratch = typename Sums::Scratch;

  __device__ __forceinline__ ActivatedRows(const BackwardPointers<T>& p, const Team<false>& team, const uint4* shared,
                                           const Scratch& scratch)
      : p_(p),
        column_(team.first() * N),
        across_(team.stride() * N),
        tasks_(tasks_of(p)),
        rows_(p, team),
        begin_(begin_of_thread(shared)),
        turns_(begin_, column_, across_),
        parameters_(begin_ + Turns::kBytes),
        sums_(scratch),
        dropout_(dropout_row(p.dropout, 0, p.columns)) {}

  __device__ __forceinline__ void run(ParameterShares<kVectors, N>& shares) {
    if (rows_.most > 0) turns_.ask(p_, rows_, rows_.first, tasks_);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (rows_.end[v] > 0) parameters_.template keep<kKind>(p_, v, column_ + v * across_);
    }
    unsigned row = rows_.first;
    for (int done = 0; done < rows_.most; done += kRows, row += kRows * rows_.step) {
      turns_.begin();
      if (done + kRows < rows_.most) turns_.ask(p_, rows_, row + kRows * rows_.step, tasks_);
      float g[kRows][kVectors][N];
      float sums[2 * kRows] = {};
      for_each([&](int r, int v) {
        const unsigned this_row = row + r * rows_.step;
        if (this_row < rows_.end[v]) look(this_row, r, v, g[r][v], shares, sums[2 * r], sums[2 * r + 1]);
      });
      if ((tasks_ & kRowTasks) == 0) continue;
      sums_.reduce(sums);
      for_each([&](int r, int v) {
        const float2 of_row = {sums[2 * r], sums[2 * r + 1]};
        const InputGradient<T> gradient(of_row, turns_.mean(r), turns_.rstd(r), tasks_ & kCentre, p_.columns);
        float h[N];
        turns_.h(r, v, h);
        gradient.apply(h, g[r][v]);
      });
      if (tasks_ & kRareTasks) do_rare(row, g);
      if (tasks_ & kStoreDx) store(p_.dx, row, g);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t begin_of_thread(const uint4* shared) {
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
    return held_address(shared_address(shared) + thread / kWarp * kBytes + thread % kWarp * 16);
  }

  template <typename Body>
  __device__ __forceinline__ static void for_each(const Body& body) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) body(r, v);
    }
  }

  // Computes g for one vector, and adds to the sums.
  __device__ __forceinline__ void look(unsigned row, int r, int v, float (&g)[N], ParameterShares<kVectors, N>& shares,
                                       float& of_g, float& of_product) {
    float x_hat[N], z[N], parameter[N];
    turns_.h(r, v, x_hat);
    turns_.dy(r, v, g);
    normalize<T>(turns_.mean(r), turns_.rstd(r), x_hat);
    parameters_.bias(v, z);
    parameters_.weight(v, parameter);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = fmaf(x_hat[i], parameter[i], z[i]);
    if (tasks_ & kDropDy) drop_vector(row, v, g);
    undo_activation<kKind != Kind::kAny && kRounded<T>>(p_, z, g);
    add_to_shares(x_hat, g, v, shares);
    parameters_.weight(v, parameter);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= parameter[i];
    add_to_sums(x_hat, g, of_g, of_product);
  }

  __device__ __forceinline__ void do_rare(unsigned row, float (&gradient)[kRows][kVectors][N]) {
    if (tasks_ & kAddDh) {
      for_each([&](int r, int v) {
        float dh[N];
        turns_.dh(r, v, dh);
#pragma unroll
        for (int i = 0; i < N; ++i) gradient[r][v][i] += dh[i];
      });
    }
    if (tasks_ & kStoreDresidual) store(p_.dresidual, row, gradient);
    if (tasks_ & kDropDx) for_each([&](int r, int v) { drop_vector(row + r * rows_.step, v, gradient[r][v]); });
  }

  __device__ __forceinline__ void drop_vector(unsigned row, int v, float (&values)[N]) {
    dropout_.counter = dropout_counter(row, 0, p_.columns);
    drop<N>(dropout_, column_ + v * across_, values);
  }

  // Only the store depends on whether the vector exists, so the compiler needs a predicate instead of a branch.
  __device__ __forceinline__ void store(const Output& target, unsigned row, const float (&values)[kRows][kVectors][N]) const {
    for_each([&](int r, int v) {
      const unsigned this_row = row + r * rows_.step;
      const bool there = this_row < rows_.end[v];
      const int column = column_ + v * across_;
      if constexpr (kKind == Kind::kAny) {
        if (there) store_promoted<T, N>(target, row_offset(this_row, p_.columns) + column, values[r][v]);
      } else {
        Packed<T, N> packed;
        pack(values[r][v], packed);
        const unsigned pitch = p_.columns * static_cast<unsigned>(sizeof(T));
        T* const place = down_to(static_cast<T*>(target.data) + column, this_row, pitch);
        if (there) store_packed(place, packed);
      }
    });
  }

  const BackwardPointers<T>& p_;
  int column_;  // of the thread's first vector
  int across_;  // distance to its next vector
  unsigned tasks_;
  TeamRows<T, kVectors> rows_;
  uint32_t begin_;
  Turns turns_;
  Kept parameters_;
  Sums sums_;
  DropoutRow dropout_;
};

}  // namespace norm_act
}  // namespace kernel_pytorch
