// Products of float32 rows and packed float16 weights: FBGEMM's, in as many threads as torch has, without what torch's own
// operator for packages does besides; see half_weights.py.

#include <ATen/native/quantized/PackedParams.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

extern "C" AOTITorchError aoti_torch_cpu_half_linear(
    AtenTensorHandle rows,
    AtenTensorHandle packed,
    int64_t /*out_features*/,
    AtenTensorHandle* output) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    // The tensor that stands for packed weights holds a pointer to them.
    void* data = tensor_handle_to_tensor_pointer(packed)->data_ptr();
    const auto& weights = *static_cast<c10::intrusive_ptr<LinearPackedParamsBase>*>(data);
    *output = new_tensor_handle(weights->apply_dynamic(*tensor_handle_to_tensor_pointer(rows)));
  });
}
