// The matrix product without XLA, in buffers of exactly their size, for sanitizers: every format, shapes with and
// without remainders, serial and with threads. Exits with 1 if the two differ.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu.h"
#include "linear_run.h"

namespace {

using namespace jaxinfer;

class Serial final : public Parallel {
 public:
  int64_t threads() const override { return 1; }
  void run(int64_t chunks, Body body, void* context) override {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
  }
};

class Threads final : public Parallel {
 public:
  int64_t threads() const override { return 3; }
  void run(int64_t chunks, Body body, void* context) override {
    std::vector<std::thread> workers;
    for (int64_t t = 0; t < threads(); ++t)
      workers.emplace_back([=] {
        for (int64_t chunk = t; chunk < chunks; chunk += 3) body(context, chunk);
      });
    for (std::thread& worker : workers) worker.join();
  }
};

uint32_t next(uint32_t& state) { return state = state * 1664525u + 1013904223u; }

// Random bytes, but no infinities or NaN in any of the formats: the upper exponent bits are off.
std::vector<uint8_t> weight(int64_t bytes, uint32_t seed) {
  std::vector<uint8_t> data(static_cast<size_t>(bytes));
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(next(seed) >> 24) & 0xbf;
  return data;
}

bool check(const LinearKernels& kernels, int format, int64_t rows, int64_t outputs, int64_t inputs, Float dtype) {
  const int other = kernels.first_format;
  const size_t item = dtype == Float::kF32 ? 4 : 2;
  const std::vector<uint8_t> first = weight(part_bytes(kernels, format, outputs, inputs), 1);
  const std::vector<uint8_t> second = weight(part_bytes(kernels, other, 5, inputs), 2);
  const std::vector<uint8_t> x(static_cast<size_t>(rows * inputs) * item, 0x3c);
  const std::vector<float> bias(static_cast<size_t>(outputs + 5), 0.5f);
  std::vector<uint8_t> y[2];
  Serial serial;
  Threads threads;
  for (int i = 0; i < 2; ++i) {
    y[i].assign(static_cast<size_t>(rows * (outputs + 5)) * item, 0);
    LinearCall call{x.data(), dtype, rows, inputs, {{format, first.data(), outputs}, {other, second.data(), 5}},
                    bias.data(), y[i].data(), dtype};
    linear_run(kernels, i == 0 ? static_cast<Parallel&>(serial) : threads, call);
  }
  std::vector<int32_t> ids = {-1, 0, static_cast<int32_t>(outputs + 4), static_cast<int32_t>(outputs - 1), 1 << 30};
  std::vector<uint8_t> embedded(ids.size() * static_cast<size_t>(inputs) * item);
  rows_run(linear_kernels(), serial, {ids.data(), static_cast<int64_t>(ids.size()), inputs,
                             {{format, first.data(), outputs}, {other, second.data(), 5}}, embedded.data(), dtype});
  const bool same = y[0] == y[1];
  if (!same) std::printf("format %d rows %ld outputs %ld: threads change the result\n", format, (long)rows, (long)outputs);
  return same;
}

}  // namespace

int main() {
  if (cpu_level() == Level::kNone) return 2;
  bool good = true;
  int cases = 0;
  for (const LinearKernels* kernels : {&linear_kernels(), &linear_int8_kernels(), &linear_bf16_kernels()})
    for (int format = kernels->first_format; format < kernels->formats; ++format) {
      const bool dense = format < 3;
      for (int64_t rows : {0, 1, 2, 3, 7, 130})
        for (int64_t outputs : {1, 32, 45, 300})
          for (int64_t inputs : {dense ? 1 : 256, dense ? 77 : 512})
            for (Float dtype : {Float::kF32, Float::kBf16, Float::kF16}) {
              good = check(*kernels, format, rows, outputs, inputs, dtype) && good;
              ++cases;
            }
    }
  std::printf("%d cases\n", cases);
  return good ? 0 : 1;
}
