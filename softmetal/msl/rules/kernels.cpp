// Kernels.
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

class Kernels : public Family {
 public:
  using Family::Family;
};

}  // namespace

std::unique_ptr<Family> kernels(Program& program) { return std::make_unique<Kernels>(program); }

}  // namespace softmetal::rules
