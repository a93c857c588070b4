// Sleeping on a 32-bit word of memory that may be shared between processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace jaxfabric {

// Sleeps while *word == expected, until woken or the deadline; may return early for no reason.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, Deadline deadline);
// Wakes every sleeper on the word.
void FutexWakeAll(std::atomic<uint32_t>* word);

}  // namespace jaxfabric
