// Products of float32 rows and panels of weights, shared by half_linear.cpp and quantized_linear.cpp.
//
// Every output is a sum over the inputs in order, so it does not depend on other rows or on the number of threads.
// Weights are read from memory once and prefetched; without prefetching, the loop reads at two thirds of the speed.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace {

using Vec = at::vec::Vectorized<float>;
using Words = at::vec::Vectorized<int32_t>;

constexpr int64_t kLanes = Vec::size();
// Outputs per panel; a panel stores them contiguously for each input, in groups. Within a group of bfloat16 weights,
// outputs that are kApart from each other are stored in pairs.
constexpr int64_t kPanel = 64;
constexpr int64_t kGroup = 32;
constexpr int64_t kApart = kGroup / 2;
static_assert(kApart % kLanes == 0);
constexpr int64_t kPairs = 2;
// Rows per loading of weights to vector registers, of which AVX2 has 16 and AVX-512 has 32.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int64_t kTile = 3;
#else
constexpr int64_t kTile = 6;
#endif
// Inputs per step, so that their weights stay in the L2 cache for all tiles.
constexpr int64_t kDepth = 512;
// With at least kMany rows, weights are converted to float once for all tiles, kWideDepth inputs at a time.
constexpr int64_t kMany = 3 * kTile + 1;
constexpr int64_t kWideDepth = 64;
// Prefetch distance in bytes.
constexpr int64_t kAhead = 4096;
constexpr int64_t kLine = 64;
// Minimum number of products per thread.
constexpr int64_t kShare = 1 << 16;

// Index in a panel of the first outputs of a pair of registers; the second register's are kApart later.
constexpr int64_t place(int64_t pair) {
  const int64_t at = pair * kLanes;
  return at / kApart * kGroup + at % kApart;
}

// Load one input's weights for a pair of registers whose first outputs are at index `at`.
void load(const float* weights, int64_t at, Vec* pair) {
  pair[0] = Vec::loadu(weights + at);
  pair[1] = Vec::loadu(weights + at + kApart);
}

void load(const at::Half* weights, int64_t at, Vec* pair) {
  at::vec::load_to_float(weights + at, pair[0]);
  at::vec::load_to_float(weights + at + kApart, pair[1]);
}

// A pair of bfloat16 numbers fills 32 bits, so converting each to float takes one instruction.
void load(const at::BFloat16* weights, int64_t at, Vec* pair) {
  static_assert(Words::size() == kLanes && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  const Words words = Words::loadu(weights + at / kGroup * kGroup + at % kGroup * 2);
  const Words low = words << Words(16), high = words & Words(-65536);
  std::memcpy(&pair[0], &low, sizeof(Vec));
  std::memcpy(&pair[1], &high, sizeof(Vec));
}

// Prefetch weights of one input. Prefetching beyond the end of the panels is harmless.
template <typename T>
void fetch(const T* weights) {
  for (int64_t line = 0; line < kPanel * int64_t(sizeof(T)); line += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + kAhead + line, 0, 2);
  }
}

struct Rows {
  const float* inputs;
  int64_t stride;
  float* outputs;
  int64_t output_stride;
};

// Add the products of `depth` inputs to the outputs of R rows, or set the outputs if `is_first`.
template <int R, bool Fetch, typename T>
void add(const Rows& rows, const T* panel, int64_t depth, bool is_first) {
  for (int64_t pair = 0; pair < kPanel / (2 * kLanes); pair += kPairs) {
    Vec sums[R][kPairs][2];
    const auto output = [&](int r, int p, int second) {
      return rows.outputs + r * rows.output_stride + place(pair + p) + second * kApart;
    };
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < kPairs; ++p) {
        for (int second = 0; second < 2; ++second) {
          sums[r][p][second] = is_first ? Vec(0.0f) : Vec::loadu(output(r, p, second));
        }
      }
    }
    for (int64_t i = 0; i < depth; ++i) {
      const T* weights = panel + i * kPanel;
      if (Fetch && pair == 0) {
        fetch(weights);
      }
      Vec wide[kPairs][2];
      for (int p = 0; p < kPairs; ++p) {
        load(weights, place(pair + p), wide[p]);
      }
      for (int r = 0; r < R; ++r) {
        const Vec input(rows.inputs[r * rows.stride + i]);
        for (int p = 0; p < kPairs; ++p) {
          for (int second = 0; second < 2; ++second) {
            sums[r][p][second] = at::vec::fmadd(input, wide[p][second], sums[r][p][second]);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < kPairs; ++p) {
        for (int second = 0; second < 2; ++second) {
          sums[r][p][second].store(output(r, p, second));
        }
      }
    }
  }
}

template <int R, typename... Arguments>
void add_tile(int64_t count, bool fetches, const Arguments&... arguments) {
  if constexpr (R > 1) {
    if (count < R) {
      return add_tile<R - 1>(count, fetches, arguments...);
    }
  }
  fetches ? add<R, true>(arguments...) : add<R, false>(arguments...);
}

// Add the products of `depth` inputs to all rows, in tiles whose sizes differ by at most one row.
template <typename T>
void add_all(const Rows& rows, int64_t count, const T* panel, int64_t depth, bool is_first, bool fetches) {
  const int64_t tiles = (count + kTile - 1) / kTile;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = count * tile / tiles, end = count * (tile + 1) / tiles;
    const Rows tile_rows{
        rows.inputs + begin * rows.stride, rows.stride, rows.outputs + begin * rows.output_stride, rows.output_stride};
    add_tile<kTile>(end - begin, fetches && tile == 0, tile_rows, panel, depth, is_first);
  }
}

// Compute the outputs of all rows and panels, in parallel; `multiply_panel(rows, count, panel)` those of one panel.
template <typename F>
at::Tensor multiply(const at::Tensor& rows, int64_t panels, const F& multiply_panel) {
  const at::Tensor whole = rows.contiguous();
  const int64_t count = rows.size(0), depth = rows.size(1), width = panels * kPanel;
  at::Tensor outputs = at::empty({count, width}, whole.options());
  const float* inputs = whole.const_data_ptr<float>();
  float* results = outputs.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kShare / std::max<int64_t>(1, depth * kPanel * count));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      multiply_panel(Rows{inputs, depth, results + panel * kPanel, width}, count, panel);
    }
  });
  return outputs;
}

}  // namespace
