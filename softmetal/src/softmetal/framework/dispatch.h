// Queries of dispatch queues that <dispatch/dispatch.h> lacks.
#pragma once
#include <dispatch/dispatch.h>

namespace softmetal {
bool on_queue(dispatch_queue_t queue);  // is this thread running a block of that queue?
}
