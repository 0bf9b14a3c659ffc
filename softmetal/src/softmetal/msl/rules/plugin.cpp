// The traversal of a program, and the plugin that clang loads.
#include <clang/AST/ASTConsumer.h>
#include <clang/AST/RecursiveASTVisitor.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/FrontendPluginRegistry.h>

#include "rules.h"

namespace softmetal::rules {

void Program::refuse(clang::SourceLocation place, const llvm::Twine& sentence) {
  place = context.getSourceManager().getExpansionLoc(place);
  std::string text = sentence.str();
  if (!refused_.emplace(place.getRawEncoding(), text).second) return;
  clang::DiagnosticsEngine& diagnostics = context.getDiagnostics();
  diagnostics.Report(place, diagnostics.getCustomDiagID(clang::DiagnosticsEngine::Error, "%0")) << text;
}

bool Program::is_library(clang::SourceLocation place) const {
  return place.isInvalid() || context.getSourceManager().isInSystemHeader(place);
}

bool Program::is_library(const clang::Decl* declaration) const {
  return is_library(declaration->getLocation());
}

llvm::StringRef Program::library_name(const clang::FunctionDecl* function) const {
  if (!function || !function->getIdentifier() || !is_library(function)) return {};
  const clang::DeclContext* scope = function->getDeclContext()->getEnclosingNamespaceContext();
  const auto* space = llvm::dyn_cast<clang::NamespaceDecl>(scope);
  return space && space->getName() == "metal" ? function->getName() : llvm::StringRef();
}

std::vector<llvm::StringRef> annotations(const clang::Decl* declaration, llvm::StringRef kind) {
  std::vector<llvm::StringRef> found;
  for (const auto* attribute : declaration->specific_attrs<clang::AnnotateAttr>()) {
    llvm::StringRef text = attribute->getAnnotation();
    if (text.consume_front("softmetal:") && text.consume_front(kind)) found.push_back(text.ltrim());
  }
  return found;
}

Space space_of(clang::QualType type) {
  switch (type.getAddressSpace()) {
    case clang::LangAS::opencl_global_device:
    case clang::LangAS::sycl_global_device:
      return Space::kDevice;
    case clang::LangAS::opencl_local:
    case clang::LangAS::sycl_local:
      return Space::kThreadgroup;
    case clang::LangAS::opencl_global_host:
    case clang::LangAS::sycl_global_host:
      return Space::kConstant;
    default:
      return Space::kThread;
  }
}

const char* name_of(Space space) {
  constexpr const char* kNames[] = {"thread", "device", "threadgroup", "constant"};
  return kNames[int(space)];
}

std::string spelled(const Program& program, clang::QualType type) {
  return type.getAsString(program.context.getPrintingPolicy());
}

namespace {

class Walk : public clang::RecursiveASTVisitor<Walk> {
 public:
  Walk(Program& program, const std::vector<std::unique_ptr<Family>>& families)
      : program_(program), families_(families) {}

  bool shouldVisitTemplateInstantiations() const { return true; }

  bool TraverseDecl(clang::Decl* declaration) {
    if (!declaration) return true;
    const bool is_root = llvm::isa<clang::TranslationUnitDecl>(declaration);
    if (!is_root && program_.is_library(declaration)) return true;
    if (const auto* named = llvm::dyn_cast<clang::NamedDecl>(declaration);
        named && named->getIdentifier() && named->getName().starts_with("softmetal_")) {
      for (const auto& family : families_) family->translated(named);
      return true;
    }
    const clang::FunctionDecl* outer = program_.function;
    if (const auto* function = llvm::dyn_cast<clang::FunctionDecl>(declaration)) program_.function = function;
    const bool go_on = RecursiveASTVisitor::TraverseDecl(declaration);
    program_.function = outer;
    return go_on;
  }
  // Visits the semantic form: the syntactic form has no conversions.
  bool TraverseInitListExpr(clang::InitListExpr* list) {
    return TraverseSynOrSemInitListExpr(list->isSemanticForm() ? list : list->getSemanticForm());
  }
  bool VisitDecl(clang::Decl* declaration) {
    for (const auto& family : families_) family->declaration(declaration);
    return true;
  }
  bool VisitStmt(clang::Stmt* statement) {
    for (const auto& family : families_) family->statement(statement);
    return true;
  }

 private:
  Program& program_;
  const std::vector<std::unique_ptr<Family>>& families_;
};

class Consumer : public clang::ASTConsumer {
 public:
  Consumer(int version, bool refuses_unsure) : version_(version), refuses_unsure_(refuses_unsure) {}

  void HandleTranslationUnit(clang::ASTContext& context) override {
    if (context.getDiagnostics().hasErrorOccurred()) return;
    Program program(context, version_, refuses_unsure_);
    std::vector<std::unique_ptr<Family>> families;
    for (auto make : {address_spaces, constants, conversions, declarations, kernels, library, unsure})
      families.push_back(make(program));
    Walk(program, families).TraverseDecl(context.getTranslationUnitDecl());
    for (const auto& family : families) family->end();
  }

 private:
  int version_;
  bool refuses_unsure_;
};

class Action : public clang::PluginASTAction {
 protected:
  std::unique_ptr<clang::ASTConsumer> CreateASTConsumer(clang::CompilerInstance&, llvm::StringRef) override {
    return std::make_unique<Consumer>(version_, refuses_unsure_);
  }
  bool ParseArgs(const clang::CompilerInstance&, const std::vector<std::string>& arguments) override {
    for (const std::string& argument : arguments) {
      if (argument == "unsure")
        refuses_unsure_ = true;
      else
        version_ = std::stoi(argument);
    }
    return true;
  }
  ActionType getActionType() override { return AddBeforeMainAction; }

 private:
  int version_ = 310;
  bool refuses_unsure_ = false;
};

const clang::FrontendPluginRegistry::Add<Action> registered("softmetal",
                                                            "what Metal refuses and C++ accepts");

}  // namespace
}  // namespace softmetal::rules
