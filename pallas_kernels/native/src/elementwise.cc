// Norms and gates as calls of XLA.
#include "elementwise.h"

#include "buffers.h"
#include "cpu.h"
#include "helpers.h"
#include "workers.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

// Floats of one piece of work: less is not worth a second thread.
constexpr int64_t kPiece = 16 * 1024;

template <typename F>
void each_piece(ffi::ThreadPool& pool, int64_t rows, int64_t row_floats, F f) {
  const int64_t some = row_floats < kPiece ? kPiece / row_floats : 1;
  HelpedParallel(pool.num_threads()).each((rows + some - 1) / some, [&](int64_t piece) {
    FlushSubnormal flush;
    const int64_t begin = piece * some;
    f(begin, begin + some < rows ? begin + some : rows);
  });
}

using Floats = ffi::Buffer<ffi::F32>;

ffi::Error rms_norm(ffi::ThreadPool pool, Floats x, Floats residual, Floats factor, ffi::Result<Floats> y,
                    ffi::Result<Floats> sum, float eps) {
  const auto dims = x.dimensions();
  if (dims.size() != 2 || static_cast<int64_t>(factor.element_count()) != dims[1] ||
      (residual.element_count() && residual.element_count() != x.element_count()))
    return ffi::Error::InvalidArgument("rms_norm: the shapes of x, residual and factor do not fit");
  const Norm a{dims[0], dims[1], x.typed_data(), present(residual), factor.typed_data(), sum->typed_data(),
               y->typed_data(), eps};
  each_piece(pool, a.T, a.D, [&](int64_t begin, int64_t end) {
    (cpu_level() == Level::kV4 ? v4::rms_norm : v3::rms_norm)(a, begin, end);
  });
  return ffi::Error::Success();
}

ffi::Error gate(ffi::ThreadPool pool, Floats gate_up, ffi::Result<Floats> y, int64_t activation) {
  const auto dims = gate_up.dimensions();
  if (dims.size() != 2 || dims[1] % 2 || activation < 0 || activation > static_cast<int64_t>(Gate::kGeluTanh))
    return ffi::Error::InvalidArgument("gate: an odd width, or an unknown activation");
  const Gated a{dims[0], dims[1] / 2, gate_up.typed_data(), y->typed_data(), static_cast<Gate>(activation)};
  each_piece(pool, a.T, a.F, [&](int64_t begin, int64_t end) {
    (cpu_level() == Level::kV4 ? v4::gate : v3::gate)(a, begin, end);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_gate, gate,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>().Attr<int64_t>(
                                  "activation"));

}  // namespace jaxinfer
