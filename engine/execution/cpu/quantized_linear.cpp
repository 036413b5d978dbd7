// Products of float32 rows and 8-bit or 4-bit weights with scales, in panels; see quantized_weights.py and panels.h.
//
// Weights are converted to float32 and scaled, kWideDepth inputs at a time, and then multiplied by all rows. They are
// converted register by register, because torch's flags keep the compiler from vectorizing loops.

#include "panels.h"

namespace {

// Load as many integers as a register has numbers.
Words load_integers(const int8_t* integers) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  return at::vec::convert_to_int32<int8_t>(integers);
#else
  int32_t wide[kLanes];
  std::copy_n(integers, kLanes, wide);
  return Words::loadu(wide);
#endif
}

// Set the weights of one register's outputs: integers times their scales.
void scale_register(const Words& integers, const float* scales, float* wide) {
  (at::vec::convert_to_fp_of_same_size<float>(integers) * Vec::loadu(scales)).store(wide);
}

// Set the weights of one input: of every output an integer times its scale.
void scale(const int8_t* integers, const float* scales, float* wide) {
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    scale_register(load_integers(integers + i), scales + i, wide + i);
  }
}

// The same of 4-bit integers. The lower half of byte i is output i, the upper half output i + kPanel / 2.
void scale(const uint8_t* bytes, const float* scales, float* wide) {
  constexpr int64_t half = kPanel / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Words pairs = load_integers(reinterpret_cast<const int8_t*>(bytes) + i);
    scale_register((pairs << Words(28)) >> Words(28), scales + i, wide + i);
    scale_register(pairs >> Words(4), scales + half + i, wide + half + i);
  }
}

template <typename T>
constexpr int64_t kBytes = std::is_same_v<T, int8_t> ? kPanel : kPanel / 2;

// Multiply one panel; `group` inputs share a scale.
template <typename T>
void multiply_panel(const Rows& rows, int64_t count, const T* panel, const float* scales, int64_t depth, int64_t group) {
  alignas(kLine) float wide[kWideDepth * kPanel];
  for (int64_t first = 0; first < depth; first += kWideDepth) {
    const int64_t last = std::min(first + kWideDepth, depth);
    for (int64_t input = first; input < last;) {
      const int64_t index = input / group, end = std::min(last, (index + 1) * group);
      for (; input < end; ++input) {
        const T* integers = panel + input * kBytes<T>;
        __builtin_prefetch(integers + kAhead, 0, 2);
        scale(integers, scales + index * kPanel, wide + (input - first) * kPanel);
      }
    }
    const Rows inputs{rows.inputs + first, rows.stride, rows.outputs, rows.output_stride};
    add_all(inputs, count, static_cast<const float*>(wide), last - first, first == 0, false);
  }
}

template <typename T>
at::Tensor multiply_panels(const at::Tensor& rows, const at::Tensor& panels, const at::Tensor& scales) {
  const int64_t depth = rows.size(1), groups = scales.size(1);
  const T* integers = panels.const_data_ptr<T>();
  const float* factors = scales.const_data_ptr<float>();
  return multiply(rows, panels.size(0), [&](const Rows& panel_rows, int64_t count, int64_t panel) {
    multiply_panel(
        panel_rows,
        count,
        integers + panel * depth * kBytes<T>,
        factors + panel * groups * kPanel,
        depth,
        depth / groups);
  });
}

at::Tensor quantized_linear(const at::Tensor& rows, const at::Tensor& panels, const at::Tensor& scales) {
  const bool has_bytes = panels.scalar_type() == at::kChar;
  TORCH_CHECK(
      rows.dim() == 2 && panels.dim() == 3 && panels.size(1) == rows.size(1) && panels.size(1) > 0 &&
          panels.size(2) == (has_bytes ? kPanel : kPanel / 2) && panels.is_contiguous() && scales.dim() == 3 &&
          scales.size(0) == panels.size(0) && scales.size(1) > 0 && panels.size(1) % scales.size(1) == 0 &&
          scales.size(2) == kPanel && scales.is_contiguous(),
      "quantized_linear: rows ", rows.sizes(), " do not go with panels ", panels.sizes(), " and scales ", scales.sizes());
  return has_bytes ? multiply_panels<int8_t>(rows, panels, scales) : multiply_panels<uint8_t>(rows, panels, scales);
}

}  // namespace

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("quantized_linear", quantized_linear);
}

extern "C" AOTITorchError aoti_torch_cpu_quantized_linear(
    AtenTensorHandle rows,
    AtenTensorHandle panels,
    AtenTensorHandle scales,
    AtenTensorHandle* output) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = new_tensor_handle(quantized_linear(
        *tensor_handle_to_tensor_pointer(rows),
        *tensor_handle_to_tensor_pointer(panels),
        *tensor_handle_to_tensor_pointer(scales)));
  });
}
