// Helpers under several callers at once: every chunk of every call runs exactly once. For sanitizers, that of threads too.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "helpers.h"

namespace {

constexpr int kCallers = 3, kCalls = 4000, kChunks = 7;

int wrong_calls(jaxinfer::Helpers& helpers, int caller) {
  int wrong = 0;
  for (int call = 0; call < kCalls; ++call) {
    int counts[kChunks] = {};
    const auto body = [](void* context, int64_t chunk) { ++static_cast<int*>(context)[chunk]; };
    const int chunks = 1 + (call + caller) % kChunks;
    const bool helped = helpers.run(chunks, body, counts);
    for (int chunk = 0; chunk < kChunks; ++chunk) wrong += counts[chunk] != (helped && chunk < chunks);
    if (call % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // helpers go to sleep
  }
  return wrong;
}

}  // namespace

int main() {
  auto* const helpers = new jaxinfer::Helpers(2);  // never destroyed, as in the library
  std::vector<int> wrong(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] { wrong[caller] = wrong_calls(*helpers, caller); });
  for (std::thread& caller : callers) caller.join();
  int total = 0;
  for (int count : wrong) total += count;
  std::printf("%d cases, %d wrong\n", kCallers * kCalls, total);
  std::fflush(stdout);
  std::_Exit(total == 0 ? 0 : 1);
}
