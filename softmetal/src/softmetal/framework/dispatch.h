// What the rest of softmetal asks of dispatch queues beyond <dispatch/dispatch.h>.
#pragma once
#include <dispatch/dispatch.h>

namespace softmetal {
bool on_queue(dispatch_queue_t queue);  // is this thread running a block of that queue?
}
