// Rules for code that Metal's compiler refuses and clang would accept in the translated program. Each file
// has a family of rules; section numbers refer to the Metal Shading Language specification.
//
//   address_spaces.cpp  4 address spaces, 4.x `this` of member functions
//   constants.cpp       5.8 function constants
//   conversions.cpp     2.1, 2.2, 2.6 scalar, vector and bfloat conversions, as_type
//   declarations.cpp    1.5 features of C++ that Metal lacks, 4.2 objects in threadgroup and constant memory
//   kernels.cpp         5.1, 5.2 kernels, their parameters and attributes
//   library.cpp         6 types and address spaces that library functions take
//   unsure.cpp          constructs that are refused only on request
#pragma once
#include <clang/AST/ASTContext.h>
#include <clang/AST/Attr.h>
#include <clang/AST/DeclCXX.h>
#include <clang/AST/DeclTemplate.h>
#include <clang/AST/ExprCXX.h>
#include <llvm/ADT/Twine.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace softmetal::rules {

class Program {
 public:
  Program(clang::ASTContext& context, int version, bool refuses_unsure)
      : context(context), version(version), refuses_unsure(refuses_unsure) {}

  clang::ASTContext& context;
  const int version;  // language version: __METAL_VERSION__
  const bool refuses_unsure;

  // The function whose body is being walked; null outside of functions.
  const clang::FunctionDecl* function = nullptr;

  // Reports an error at a place in the .metal source, once.
  void refuse(clang::SourceLocation place, const llvm::Twine& sentence);

  bool is_library(clang::SourceLocation place) const;
  bool is_library(const clang::Decl* declaration) const;
  // Returns the name of a function in the library's namespace metal, otherwise "".
  llvm::StringRef library_name(const clang::FunctionDecl* function) const;

 private:
  std::set<std::pair<unsigned, std::string>> refused_;
};

// A family of rules. It visits every node of the program, but not of the library, before the nodes inside it;
// templates both as written and as instantiated.
class Family {
 public:
  explicit Family(Program& program) : program(program) {}
  virtual ~Family() = default;
  virtual void declaration(const clang::Decl*) {}
  virtual void statement(const clang::Stmt*) {}
  // Declarations that the translator adds: their names start with softmetal_.
  virtual void translated(const clang::NamedDecl*) {}
  virtual void end() {}

 protected:
  Program& program;
};

std::unique_ptr<Family> address_spaces(Program&);
std::unique_ptr<Family> constants(Program&);
std::unique_ptr<Family> conversions(Program&);
std::unique_ptr<Family> declarations(Program&);
std::unique_ptr<Family> kernels(Program&);
std::unique_ptr<Family> library(Program&);
std::unique_ptr<Family> unsure(Program&);

// Returns the texts of a kind in the translator's annotations, __attribute__((annotate("softmetal:KIND
// TEXT"))).
std::vector<llvm::StringRef> annotations(const clang::Decl* declaration, llvm::StringRef kind);

enum class Space { kThread, kDevice, kThreadgroup, kConstant };
Space space_of(clang::QualType type);
const char* name_of(Space space);

// Returns the type in Metal's spelling.
std::string spelled(const Program& program, clang::QualType type);

}  // namespace softmetal::rules
