// A thread-safe cache: the first caller that needs a value makes it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace fattn::metal {

// Values are pointers that live as long as the process. Concurrent callers of a missing key share the value
// that one of them makes; callers of different keys do not wait for each other. If `make` throws, the next
// caller tries again.
template <typename Key, typename Value, typename Hash = std::hash<Key>>
class OnceMap {
 public:
  template <typename Make>
  Value* get(const Key& key, const Make& make) {
    Entry& entry = entry_of(key);
    if (Value* value = entry.value.load(std::memory_order_acquire)) return value;
    std::lock_guard lock(entry.making);
    if (Value* value = entry.value.load(std::memory_order_relaxed)) return value;
    Value* value = make();
    entry.value.store(value, std::memory_order_release);
    return value;
  }

 private:
  struct Entry {
    std::mutex making;
    std::atomic<Value*> value{nullptr};
  };

  Entry& entry_of(const Key& key) {
    {
      std::shared_lock lock(mutex_);
      const auto found = entries_.find(key);
      if (found != entries_.end()) return *found->second;
    }
    std::unique_lock lock(mutex_);
    std::unique_ptr<Entry>& entry = entries_[key];
    if (!entry) entry = std::make_unique<Entry>();
    return *entry;
  }

  std::shared_mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<Entry>, Hash> entries_;
};

}  // namespace fattn::metal
