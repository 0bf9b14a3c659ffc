// The C++ interface of torch's MPS streams, for code without Objective-C.
#pragma once

#include <c10/core/Stream.h>

namespace softmetal {

// Runs all encoded commands of all streams. Throws c10::Error with the text of a failed dispatch, once. Costs
// two atomic reads if there is nothing to run.
void finish_streams();
void commit_streams();  // runs the encoded commands; a failure is raised by the next finish_streams
void synchronize_all_streams(bool wait);

// Streams of this thread. Up to torch 2.13 all three functions return the default stream.
c10::Stream current_stream();
c10::Stream stream_from_pool();
c10::Stream exchange_stream(c10::Stream stream);  // returns the previous one

void* stream_command_buffer();  // torch::mps::get_command_buffer: ends the stream's own encoder first
void* stream_dispatch_queue();

}  // namespace softmetal
