#include "threads.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace redraft {
namespace {

using Body = std::function<void(std::ptrdiff_t, std::ptrdiff_t)>;

constexpr int kSpins = 4000;          // some 50 µs: longer than Python needs between two operations
constexpr std::ptrdiff_t kChunks = 8;  // a thread: small enough to even out, large enough to be worth taking

struct Section {
  const Body* body;
  std::ptrdiff_t count, chunk;
  std::atomic<std::ptrdiff_t> next{0};

  void work() {
    while (true) {
      const std::ptrdiff_t first = next.fetch_add(chunk, std::memory_order_relaxed);
      if (first >= count) return;
      (*body)(first, std::min(count, first + chunk));
    }
  }
};

class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stop_ = true;
      ++ticket_;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(Section& section) {
    std::lock_guard<std::mutex> one_at_a_time(running_);
    section_ = &section;
    {
      std::lock_guard<std::mutex> lock(sleep_);
      ++ticket_;  // odd: open
    }
    if (sleeping_ > 0) wake_.notify_all();
    section.work();
    ++ticket_;  // even: closed; a worker that comes now turns back
    for (int spin = 0; inside_ > 0; ++spin) {
      if (spin < kSpins) {
        _mm_pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void serve() {
    uint64_t seen = 0;
    while (true) {
      seen = wait_for_change(seen);
      if (stop_) return;
      if (seen % 2 == 0) continue;
      ++inside_;
      if (ticket_ == seen) section_->work();  // entered before it was closed, so the caller waits
      --inside_;
    }
  }

  uint64_t wait_for_change(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const uint64_t now = ticket_;
      if (now != seen && (now % 2 == 1 || stop_)) return now;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    ++sleeping_;
    wake_.wait(lock, [&] { return stop_ || (ticket_ != seen && ticket_ % 2 == 1); });
    --sleeping_;
    return ticket_;
  }

  std::vector<std::thread> workers_;
  std::mutex running_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> ticket_{0};  // sequentially consistent with `inside_`: one of the two sides sees the other
  std::atomic<int> inside_{0}, sleeping_{0};
  std::atomic<bool> stop_{false};
  Section* section_ = nullptr;
};

std::unique_ptr<Pool>& pool() {
  static std::unique_ptr<Pool> instance = std::make_unique<Pool>(1);
  return instance;
}

}  // namespace

int num_threads() { return pool()->size(); }

void set_num_threads(int count) {
  if (count == num_threads()) return;
  pool().reset();
  pool() = std::make_unique<Pool>(count);
}

void parallel_for(std::ptrdiff_t count, std::ptrdiff_t grain, const Body& body) {
  const std::ptrdiff_t threads = num_threads();
  if (threads == 1 || count <= grain) {
    if (count > 0) body(0, count);
    return;
  }
  const std::ptrdiff_t share = (count + threads * kChunks - 1) / (threads * kChunks);
  Section section{&body, count, (share + grain - 1) / grain * grain};
  pool()->run(section);
}

}  // namespace redraft
