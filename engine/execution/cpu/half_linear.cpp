// Products of float32 rows and 16-bit weights in panels; see half_weights.py and panels.h.

#include "panels.h"

namespace {

template <typename T>
void widen(const T* panel, int64_t depth, float* wide) {
  for (int64_t i = 0; i < depth * kPanel; i += kPanel) {
    fetch(panel + i);
    for (int64_t pair = 0; pair < kPanel / (2 * kLanes); ++pair) {
      Vec parts[2];
      load(panel + i, place(pair), parts);
      parts[0].store(wide + i + place(pair));
      parts[1].store(wide + i + place(pair) + kApart);
    }
  }
}

template <typename T>
void multiply_panel(const Rows& rows, int64_t count, const T* panel, int64_t depth) {
  alignas(kLine) float wide[kWideDepth * kPanel];
  const bool is_wide = count >= kMany;
  const int64_t step = is_wide ? kWideDepth : kDepth;
  for (int64_t first = 0; first < depth; first += step) {
    const int64_t num_inputs = std::min(step, depth - first);
    const T* weights = panel + first * kPanel;
    const Rows inputs{rows.inputs + first, rows.stride, rows.outputs, rows.output_stride};
    if (is_wide) {
      widen(weights, num_inputs, wide);
      add_all(inputs, count, static_cast<const float*>(wide), num_inputs, first == 0, false);
    } else {
      add_all(inputs, count, weights, num_inputs, first == 0, true);
    }
  }
}

template <typename T>
at::Tensor multiply_panels(const at::Tensor& rows, const at::Tensor& panels) {
  const int64_t depth = rows.size(1);
  const T* weights = panels.const_data_ptr<T>();
  return multiply(rows, panels.size(0), [&](const Rows& panel_rows, int64_t count, int64_t panel) {
    multiply_panel(panel_rows, count, weights + panel * depth * kPanel, depth);
  });
}

at::Tensor half_linear(const at::Tensor& rows, const at::Tensor& panels) {
  TORCH_CHECK(
      rows.dim() == 2 && panels.dim() == 3 && panels.size(1) == rows.size(1) && panels.size(1) > 0 &&
          panels.size(2) == kPanel && panels.is_contiguous(),
      "half_linear: rows ", rows.sizes(), " do not go with panels ", panels.sizes());
  if (panels.scalar_type() == at::kBFloat16) {
    return multiply_panels<at::BFloat16>(rows, panels);
  }
  return multiply_panels<at::Half>(rows, panels);
}

}  // namespace

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("half_linear", half_linear);
}

extern "C" AOTITorchError aoti_torch_cpu_half_linear(
    AtenTensorHandle rows,
    AtenTensorHandle panels,
    AtenTensorHandle* output) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = new_tensor_handle(
        half_linear(*tensor_handle_to_tensor_pointer(rows), *tensor_handle_to_tensor_pointer(panels)));
  });
}
