// Products of float32 rows and panels of weights: 16-bit floats, or integers with scales; see panel_linear.py.
//
// Every output is a sum over the inputs in order, so it does not depend on other rows or on the number of threads.
// Weights are read from memory once and prefetched; without prefetching, the loop reads at two thirds of the speed.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

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
// Vector registers of sums per row, in pairs.
constexpr int kRegisters = 4;
// Rows per loading of weights to vector registers, of which AVX2 has 16 and AVX-512 has 32.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int64_t kTile = 3;
#else
constexpr int64_t kTile = 6;
#endif
// Inputs per step, so that their weights stay in the L2 cache for all tiles.
constexpr int64_t kDepth = 512;
// Integers are converted to float once for all tiles, this many inputs at a time.
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
  for (int64_t pair = 0; pair < kPanel / (2 * kLanes); pair += kRegisters / 2) {
    Vec sums[R][kRegisters];
    const auto output = [&](int r, int n) {
      return rows.outputs + r * rows.output_stride + place(pair + n / 2) + n % 2 * kApart;
    };
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kRegisters; ++n) {
        sums[r][n] = is_first ? Vec(0.0f) : Vec::loadu(output(r, n));
      }
    }
    for (int64_t i = 0; i < depth; ++i) {
      const T* weights = panel + i * kPanel;
      if (Fetch && pair == 0) {
        fetch(weights);
      }
      Vec wide[kRegisters];
      for (int n = 0; n < kRegisters; n += 2) {
        load(weights, place(pair + n / 2), wide + n);
      }
      for (int r = 0; r < R; ++r) {
        const Vec input(rows.inputs[r * rows.stride + i]);
        for (int n = 0; n < kRegisters; ++n) {
          sums[r][n] = at::vec::fmadd(input, wide[n], sums[r][n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < kRegisters; ++n) {
        sums[r][n].store(output(r, n));
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

template <typename T>
struct Floats {
  const T* weights;
};

// A panel of 8-bit integers, or of bytes with two 4-bit integers: the lower half of byte i is output i, the upper half
// output i + kPanel / 2. `group` inputs share `width` factors: kPanel scales, and as many zeros if there are any, which
// are subtracted from integers before they are scaled. They are converted register by register, because torch's flags
// keep the compiler from vectorizing loops.
template <typename T>
struct Integers {
  const T* integers;
  const float* scales;
  int64_t group;
  int64_t width;
  static constexpr int64_t kBytes = std::is_same_v<T, int8_t> ? kPanel : kPanel / 2;

  void widen(int64_t first, int64_t last, float* wide) const {
    for (int64_t input = first; input < last;) {
      const int64_t index = input / group, end = std::min(last, (index + 1) * group);
      for (; input < end; ++input, wide += kPanel) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(integers + input * kBytes);
        const float* factors = scales + index * width;
        width > kPanel ? widen_input<true>(bytes, factors, wide) : widen_input<false>(bytes, factors, wide);
      }
    }
  }

  template <bool HasZeros>
  static void widen_input(const int8_t* bytes, const float* factors, float* wide) {
    __builtin_prefetch(bytes + kAhead, 0, 2);
    for (int64_t i = 0; i < kBytes; i += kLanes) {
      const Words words = load_integers(bytes + i);
      if constexpr (kBytes == kPanel) {
        scale<HasZeros>(words, factors + i, wide + i);
      } else {
        scale<HasZeros>((words << Words(28)) >> Words(28), factors + i, wide + i);
        scale<HasZeros>(words >> Words(4), factors + kBytes + i, wide + kBytes + i);
      }
    }
  }

  static Words load_integers(const int8_t* bytes) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    return at::vec::convert_to_int32<int8_t>(bytes);
#else
    int32_t wide[kLanes];
    std::copy_n(bytes, kLanes, wide);
    return Words::loadu(wide);
#endif
  }

  template <bool HasZeros>
  static void scale(const Words& words, const float* factors, float* wide) {
    Vec numbers = at::vec::convert_to_fp_of_same_size<float>(words);
    if constexpr (HasZeros) {
      numbers = numbers - Vec::loadu(factors + kPanel);
    }
    (numbers * Vec::loadu(factors)).store(wide);
  }
};

template <typename T>
void multiply_panel(Rows rows, int64_t count, const Floats<T>& panel, int64_t depth) {
  for (int64_t first = 0; first < depth; first += kDepth, rows.inputs += kDepth) {
    const int64_t num_inputs = std::min(kDepth, depth - first);
    add_all(rows, count, panel.weights + first * kPanel, num_inputs, first == 0, true);
  }
}

template <typename T>
void multiply_panel(Rows rows, int64_t count, const Integers<T>& panel, int64_t depth) {
  alignas(kLine) float wide[kWideDepth * kPanel];
  for (int64_t first = 0; first < depth; first += kWideDepth, rows.inputs += kWideDepth) {
    const int64_t last = std::min(first + kWideDepth, depth);
    panel.widen(first, last, wide);
    add_all(rows, count, static_cast<const float*>(wide), last - first, first == 0, false);
  }
}

// Compute the outputs of all rows and panels, in parallel; `panel_at(i)` is panel i.
template <typename F>
at::Tensor multiply(const at::Tensor& rows, int64_t panels, const F& panel_at) {
  const at::Tensor whole = rows.contiguous();
  const int64_t count = rows.size(0), depth = rows.size(1), width = panels * kPanel;
  at::Tensor outputs = at::empty({count, width}, whole.options());
  const float* inputs = whole.const_data_ptr<float>();
  float* results = outputs.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kShare / std::max<int64_t>(1, depth * kPanel * count));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      multiply_panel(Rows{inputs, depth, results + i * kPanel, width}, count, panel_at(i), depth);
    }
  });
  return outputs;
}

template <typename T>
at::Tensor multiply_floats(const at::Tensor& rows, const at::Tensor& panels) {
  const T* weights = panels.const_data_ptr<T>();
  return multiply(rows, panels.size(0), [&](int64_t i) { return Floats<T>{weights + i * panels.stride(0)}; });
}

template <typename T>
at::Tensor multiply_integers(const at::Tensor& rows, const at::Tensor& panels, const at::Tensor& scales) {
  const T* integers = panels.const_data_ptr<T>();
  const float* factors = scales.const_data_ptr<float>();
  const int64_t group = panels.size(1) / scales.size(1);
  return multiply(rows, panels.size(0), [&](int64_t i) {
    return Integers<T>{integers + i * panels.stride(0), factors + i * scales.stride(0), group, scales.size(2)};
  });
}

at::Tensor panel_linear(const at::Tensor& rows, const at::Tensor& panels, const at::Tensor& scales) {
  switch (panels.scalar_type()) {
    case at::kBFloat16: return multiply_floats<at::BFloat16>(rows, panels);
    case at::kHalf: return multiply_floats<at::Half>(rows, panels);
    case at::kChar: return multiply_integers<int8_t>(rows, panels, scales);
    default: return multiply_integers<uint8_t>(rows, panels, scales);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("panel_linear", panel_linear);
}

extern "C" AOTITorchError aoti_torch_cpu_panel_linear(
    AtenTensorHandle rows,
    AtenTensorHandle panels,
    AtenTensorHandle scales,
    AtenTensorHandle* output) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = new_tensor_handle(panel_linear(
        *tensor_handle_to_tensor_pointer(rows),
        *tensor_handle_to_tensor_pointer(panels),
        *tensor_handle_to_tensor_pointer(scales)));
  });
}
