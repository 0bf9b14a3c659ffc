// Library.
#include "rules.h"

namespace softmetal::rules {
namespace {
using namespace clang;

class Library : public Family {
 public:
  using Family::Family;
};

}  // namespace

std::unique_ptr<Family> library(Program& program) { return std::make_unique<Library>(program); }

}  // namespace softmetal::rules
