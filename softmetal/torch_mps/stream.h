// The C++ face of torch's MPS stream, for code without Objective-C.
#pragma once

namespace softmetal {

// Runs everything encoded so far. Throws c10::Error with the text of a dispatch that failed, once. Nothing to
// run costs two atomic reads.
void finish_stream();
void commit_stream();  // runs what is encoded; a failure is raised by the next finish_stream

void* stream_command_buffer();  // torch::mps::get_command_buffer: ends the stream's own encoder first
void* stream_dispatch_queue();

}  // namespace softmetal
