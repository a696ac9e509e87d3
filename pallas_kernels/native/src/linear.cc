// The FFI targets of pallas_kernels/linear/native.py: check the shapes, then run.
#include <optional>
#include <string>

#include "helpers.h"
#include "linear_run.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

std::optional<Float> float_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Float::kF32;
    case ffi::DataType::BF16:
      return Float::kBf16;
    case ffi::DataType::F16:
      return Float::kF16;
    default:
      return std::nullopt;
  }
}

using Sizes = ffi::Span<const int64_t>;

// The parts of a weight, and their outputs together.
ffi::ErrorOr<std::vector<LinearPart>> parts_of(const ffi::RemainingArgs& weights, Sizes formats, Sizes sizes,
                                               int64_t inputs, int64_t* outputs) {
  const LinearKernels& kernels = linear_kernels();
  std::vector<LinearPart> parts;
  if (formats.size() != weights.size() || sizes.size() != weights.size() || weights.size() == 0)
    return ffi::Unexpected(ffi::Error::InvalidArgument("linear: a weight needs a format and a size per part"));
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto data = weights.get<ffi::Buffer<ffi::U8>>(i);
    const int format = static_cast<int>(formats[i]);
    if (!data.has_value() || format < 0 || format >= kernels.formats || sizes[i] < 1)
      return ffi::Unexpected(ffi::Error::InvalidArgument("linear: a weight is not uint8, is empty or has an unknown format"));
    const int64_t bytes = part_bytes(kernels, format, sizes[i], inputs);
    if (static_cast<int64_t>(data->element_count()) != bytes)
      return ffi::Unexpected(ffi::Error::InvalidArgument("linear: a weight has " + std::to_string(data->element_count()) +
                                                         " bytes, not " + std::to_string(bytes)));
    parts.push_back({format, data->typed_data(), sizes[i]});
    *outputs += sizes[i];
  }
  return parts;
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> bias, ffi::RemainingArgs weights,
                  ffi::Result<ffi::AnyBuffer> y, Sizes formats, Sizes sizes, int64_t activations) {
  const std::optional<Float> x_type = float_type(x.element_type()), y_type = float_type(y->element_type());
  if (!x_type || !y_type) return ffi::Error::InvalidArgument("linear: x and y must be float32, bfloat16 or float16");
  if (x.dimensions().size() != 2 || y->dimensions().size() != 2)
    return ffi::Error::InvalidArgument("linear: x and y must be matrices");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  int64_t outputs = 0;
  const auto parts = parts_of(weights, formats, sizes, inputs, &outputs);
  if (parts.has_error()) return parts.error();
  const bool has_bias = bias.element_count() != 0;
  if (y->dimensions()[0] != rows || y->dimensions()[1] != outputs ||
      (has_bias && static_cast<int64_t>(bias.element_count()) != outputs))
    return ffi::Error::InvalidArgument("linear: the shapes of x, bias, weights and y do not fit");
  if (activations < 0 || activations > 2) return ffi::Error::InvalidArgument("linear: unknown activations");
  const LinearKernels& asked = activations == 1 ? linear_int8_kernels() : activations == 2 ? linear_bf16_kernels() : linear_kernels();
  const LinearKernels& kernels = serves(asked, parts.value()) ? asked : linear_kernels();
  HelpedParallel parallel(pool.num_threads());
  linear_run(kernels, parallel,
             {x.untyped_data(), *x_type, rows, inputs, parts.value(), has_bias ? bias.typed_data() : nullptr,
              y->untyped_data(), *y_type});
  return ffi::Error::Success();
}

ffi::Error rows(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> ids, ffi::RemainingArgs weights,
                ffi::Result<ffi::AnyBuffer> y, Sizes formats, Sizes sizes) {
  const std::optional<Float> y_type = float_type(y->element_type());
  if (!y_type || y->dimensions().size() != 2 || y->dimensions()[0] != static_cast<int64_t>(ids.element_count()))
    return ffi::Error::InvalidArgument("rows: y must have a row of float32, bfloat16 or float16 for each id");
  int64_t outputs = 0;
  const auto parts = parts_of(weights, formats, sizes, y->dimensions()[1], &outputs);
  if (parts.has_error()) return parts.error();
  HelpedParallel parallel(pool.num_threads());
  rows_run(linear_kernels(), parallel,
           {ids.typed_data(), y->dimensions()[0], y->dimensions()[1], parts.value(), y->untyped_data(), *y_type});
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Sizes>("formats")
                                  .Attr<Sizes>("sizes")
                                  .Attr<int64_t>("activations"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear_rows, rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Sizes>("formats")
                                  .Attr<Sizes>("sizes"));

}  // namespace jaxinfer
