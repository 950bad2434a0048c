// What blocks.cpp and views.cpp share: vectors, and dividing work among threads.

#pragma once
#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

// A vector holds as many floats as a register of the processor. Compilers translate + - * / on such types to its instructions.
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int Int __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vec load(const float* p) { return *(const Unaligned*)p; }
static inline void store(float* p, Vec v) { *(Unaligned*)p = v; }
static inline Vec fill(float value) { return value - (Vec){}; }  // value in all lanes; keeps the sign of zero

// Call `share(first, end, thread)` in each thread: it does the items first, ..., end - 1. Each thread gets consecutive items,
// about as many as each other thread. Which items a thread gets depends on the two numbers only, so the same sums are added in
// the same order in each call.
template <class Share>
static void share_in_threads(long items, long most_threads, Share share) {
  const long threads = std::max(1l, std::min(most_threads, items));
  auto run = [&](long t) { share(items * t / threads, items * (t + 1) / threads, t); };
  std::vector<std::thread> started;
  long t = 1;
  try {
    for (; t < threads; t++) started.emplace_back(run, t);
  } catch (const std::system_error&) {  // the system starts no more threads: this thread does their work
  }
  run(0);
  for (; t < threads; t++) run(t);
  for (std::thread& each : started) each.join();
}
