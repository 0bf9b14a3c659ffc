// Asks the compile server, or spawns the MSL compiler, and reads the answer.
#include "compiler.h"

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

std::string quoted(const std::string& argument) {  // for a shell
  std::string text = "'";
  for (char c : argument) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// Runs a program that finds this package. Its output goes through files in the folder.
Output run(const std::vector<std::string>& arguments, const std::string& folder) {
  const std::string out = folder + "/out", err = folder + "/err";
  std::string command = "PYTHONPATH=" + quoted(package_parent()) + "${PYTHONPATH:+:$PYTHONPATH}";
  for (const std::string& argument : arguments) command += " " + quoted(argument);
  command += " >" + quoted(out) + " 2>" + quoted(err);
  Output output;
  output.status = system(command.c_str());
  output.out = content_of(out);
  output.err = content_of(err);
  const int status = WIFEXITED(output.status) ? WEXITSTATUS(output.status) : 0;
  if (status == 126 || status == 127)  // the shell's, for a program that cannot be run
    throw CompileError("softmetal cannot run " + arguments[0] + ": " + output.err);
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
    output = run(arguments, folder.path);
  }
  if (!WIFEXITED(output.status) || WEXITSTATUS(output.status) != 0)
    throw CompileError(output.err.empty() ? "softmetal's MSL compiler failed without a message" : output.err);
  std::string path = output.out.substr(0, output.out.find_last_not_of(" \n") + 1);
  path = path.substr(path.find_last_of('\n') + 1);
  entry.remember(path);
  return path;
}

}  // namespace softmetal
