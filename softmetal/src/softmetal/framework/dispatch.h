// Queries of dispatch queues that <dispatch/dispatch.h> lacks.
#pragma once
#include <dispatch/dispatch.h>

namespace softmetal {
bool on_queue(dispatch_queue_t queue);  // whether this thread runs a block of the queue
}
