// The C++ face of torch's MPS streams, for code without Objective-C.
#pragma once

#include <c10/core/Stream.h>

namespace softmetal {

// Runs everything that is encoded, on any stream. Throws c10::Error with the text of a dispatch that failed,
// once. Nothing to run costs two atomic reads.
void finish_streams();
void commit_streams();  // runs the encoded commands; a failure is raised by the next finish_streams
void synchronize_all_streams(bool wait);

// Of this thread. Up to torch 2.13 all three are the default stream.
c10::Stream current_stream();
c10::Stream stream_from_pool();
c10::Stream exchange_stream(c10::Stream stream);  // returns the one before

void* stream_command_buffer();  // torch::mps::get_command_buffer: ends the stream's own encoder first
void* stream_dispatch_queue();

}  // namespace softmetal
