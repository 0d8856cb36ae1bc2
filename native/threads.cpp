#include "threads.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace redraft {
namespace {

constexpr int kSpins = 20000;  // about 100 µs: longer than Python needs between two operations

class Pool {
 public:
  explicit Pool(int count) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stop_ = true;
    publish(nullptr);
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(const std::function<void(int)>& body) {
    if (workers_.empty()) {
      body(0);
      return;
    }
    std::lock_guard<std::mutex> one_section(section_);
    left_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    publish(&body);
    body(0);
    for (int spin = 0; left_.load(std::memory_order_acquire) > 0; ++spin) {
      if (spin < kSpins) {
        _mm_pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void publish(const std::function<void(int)>* body) {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      body_ = body;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
  }

  void work(int index) {
    unsigned seen = 0;
    while (true) {
      wait_past(seen);
      ++seen;
      if (stop_) return;
      (*body_)(index);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  void wait_past(unsigned seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
    sleeping_.fetch_sub(1);
  }

  std::vector<std::thread> workers_;
  std::mutex section_, sleep_;
  std::condition_variable wake_;
  std::atomic<unsigned> epoch_{0};
  std::atomic<int> left_{0}, sleeping_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int)>* body_ = nullptr;
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

void on_all_threads(const std::function<void(int)>& body) { pool()->run(body); }

void parallel_for(std::ptrdiff_t count, std::ptrdiff_t grain,
                  const std::function<void(std::ptrdiff_t, std::ptrdiff_t)>& body) {
  const std::ptrdiff_t parts = (count + grain - 1) / grain;
  const std::ptrdiff_t threads = num_threads();
  if (parts <= 1 || threads == 1) {
    if (count > 0) body(0, count);
    return;
  }
  on_all_threads([&](int thread) {
    const std::ptrdiff_t first = parts * thread / threads * grain;
    const std::ptrdiff_t end = std::min(count, parts * (thread + 1) / threads * grain);
    if (first < end) body(first, end);
  });
}

}  // namespace redraft
