// Spawns the MSL compiler and reads its answer.
#include "compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

extern char** environ;

namespace softmetal {
namespace {
namespace fs = std::filesystem;

std::string environment(const char* name, const std::string& fallback) {
  const char* value = getenv(name);
  return value && *value ? value : fallback;
}

// The folder that contains the package `softmetal`; this library is in the package's _build.
std::string package_parent() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&compile_msl), &info)) return ".";
  return fs::weakly_canonical(info.dli_fname).parent_path().parent_path().parent_path().string();
}

struct TemporaryFolder {
  std::string path = (fs::temp_directory_path() / "softmetal-XXXXXX").string();
  TemporaryFolder() {
    if (!mkdtemp(path.data())) throw CompileError("softmetal cannot make a temporary folder: " + path);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

struct Output {
  std::string out, err;
  int status = -1;
};

void drain(int out, int err, Output& output) {
  pollfd streams[2] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* texts[2] = {&output.out, &output.err};
  for (int open = 2; open > 0;) {
    if (poll(streams, 2, -1) < 0 && errno != EINTR) break;
    for (int i = 0; i < 2; ++i) {
      if (streams[i].fd < 0 || !(streams[i].revents & (POLLIN | POLLHUP))) continue;
      char chunk[4096];
      ssize_t n = read(streams[i].fd, chunk, sizeof chunk);
      if (n > 0) {
        texts[i]->append(chunk, size_t(n));
      } else {
        streams[i].fd = -1;
        --open;
      }
    }
  }
}

Output run(const std::vector<std::string>& arguments) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) throw CompileError("softmetal cannot open a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);

  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::string python_path = "PYTHONPATH=" + package_parent();
  if (const char* old = getenv("PYTHONPATH")) python_path += std::string(":") + old;
  std::vector<char*> env{python_path.data()};
  for (char** entry = environ; *entry; ++entry)
    if (strncmp(*entry, "PYTHONPATH=", 11) != 0) env.push_back(*entry);
  env.push_back(nullptr);

  pid_t child;
  int failed = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  close(err[1]);
  Output output;
  if (!failed) {
    drain(out[0], err[0], output);
    while (waitpid(child, &output.status, 0) < 0 && errno == EINTR) {
    }
  }
  close(out[0]);
  close(err[0]);
  if (failed) throw CompileError("softmetal cannot run " + arguments[0] + ": " + strerror(failed));
  return output;
}

}  // namespace

std::string compile_msl(const std::string& source, const Macros& macros, const CompileOptions& options,
                        Mode mode) {
  TemporaryFolder folder;
  std::string file = folder.path + "/program_source";  // the name that Metal's own messages use
  std::ofstream(file, std::ios::binary) << source;

  std::vector<std::string> arguments{environment("SOFTMETAL_PYTHON", "python3"),
                                     "-m",
                                     "softmetal.msl",
                                     "compile",
                                     "--source",
                                     file,
                                     "--mode",
                                     mode == Mode::kChecked ? "checked" : "fast",
                                     "--std",
                                     options.language,
                                     "--math-mode",
                                     options.math_mode,
                                     "--math-functions",
                                     options.math_functions};
  for (const auto& [name, value] : macros) {
    arguments.push_back("--define");
    arguments.push_back(name + "=" + value);
  }
  Output output = run(arguments);
  if (!WIFEXITED(output.status) || WEXITSTATUS(output.status) != 0)
    throw CompileError(output.err.empty() ? "softmetal's MSL compiler failed without a message" : output.err);
  std::string path = output.out.substr(0, output.out.find_last_not_of(" \n") + 1);
  return path.substr(path.find_last_of('\n') + 1);
}

}  // namespace softmetal
