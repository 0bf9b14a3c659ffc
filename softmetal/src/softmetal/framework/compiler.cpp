// Asks the compile server, or spawns the MSL compiler, and reads the answer.
#include "compiler.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "environment.h"
#include "module_index.h"

extern char** environ;

namespace softmetal {
namespace {
namespace fs = std::filesystem;

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

// The server's answer to a request; empty without a server.
std::string exchange(const std::string& path, const std::string& request) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path) return "";
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (server < 0) return "";
  bool sending = !connect(server, reinterpret_cast<sockaddr*>(&address), sizeof address);
  for (size_t sent = 0; sending && sent < request.size();) {
    ssize_t n = send(server, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n > 0) sent += size_t(n);
    sending = n > 0 || errno == EINTR;
  }
  std::string answer;
  char chunk[4096];
  if (sending) shutdown(server, SHUT_WR);
  for (ssize_t n; sending && ((n = read(server, chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR));)
    if (n > 0) answer.append(chunk, size_t(n));
  close(server);
  return answer;
}

// Asks the compile server at $SOFTMETAL_COMPILER (msl/server.py has the format); false if there is none.
bool ask_server(const std::vector<std::string>& arguments, Output& output) {
  std::string request = package_parent() + '\0';  // a server of another checkout refuses it
  for (const std::string& argument : arguments) request += argument + '\0';
  request += '\0';
  for (char** entry = environ; *entry; ++entry)
    for (const char* start : {"SOFTMETAL_", "HOME=", "TMPDIR=", "PATH="})
      if (!strncmp(*entry, start, strlen(start))) request += std::string(*entry) + '\0';
  request += '\0';
  std::string answer = exchange(environment("SOFTMETAL_COMPILER", ""), request);
  if (answer.empty()) return false;
  bool succeeded = answer[0] == '0';
  output.status = succeeded ? 0 : 1 << 8;  // in the format of waitpid
  (succeeded ? output.out : output.err) = answer.substr(1);
  return true;
}

}  // namespace

std::string compile_msl(const std::string& source, const Macros& macros, const CompileOptions& options,
                        Mode mode) {
  std::vector<std::string> arguments{"--mode",
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
  IndexEntry entry(source, arguments);
  if (std::string module = entry.module(); !module.empty()) return module;

  TemporaryFolder folder;
  std::string file = folder.path + "/program_source";  // the name that Metal's own messages use
  if (!(std::ofstream(file, std::ios::binary) << source << std::flush))
    throw CompileError("softmetal cannot write " + file + ": " + strerror(errno));
  arguments.insert(arguments.begin(), {"compile", "--source", file});
  Output output;
  if (!ask_server(arguments, output)) {
    arguments.insert(arguments.begin(), {environment("SOFTMETAL_PYTHON", "python3"), "-m", "softmetal.msl"});
    output = run(arguments);
  }
  if (!WIFEXITED(output.status) || WEXITSTATUS(output.status) != 0)
    throw CompileError(output.err.empty() ? "softmetal's MSL compiler failed without a message" : output.err);
  std::string path = output.out.substr(0, output.out.find_last_not_of(" \n") + 1);
  path = path.substr(path.find_last_of('\n') + 1);
  entry.remember(path);
  return path;
}

}  // namespace softmetal
