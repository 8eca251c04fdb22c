#include "server/optimizer/step_difference.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/optimizer/optimizer.h"

namespace shardd {

std::string StepDifference(const v1::Step& got, const v1::Step& want) {
  if (got.loss_scale() != want.loss_scale()) {
    return absl::StrCat("loss_scale (got ", got.loss_scale(), ", want ", want.loss_scale(), ")");
  }
  if (got.max_grad_norm() != want.max_grad_norm()) {
    return absl::StrCat("max_grad_norm (got ", got.max_grad_norm(), ", want ", want.max_grad_norm(), ")");
  }
  if (NormType(got) != NormType(want)) {
    return absl::StrCat("norm_type (got ", NormType(got), ", want ", NormType(want), ")");
  }
  if (got.part() != want.part()) {
    return absl::StrCat("part (got ", got.part() ? "true" : "false", ", want ", want.part() ? "true" : "false", ")");
  }
  if (const std::string left = absl::StrJoin(got.left_groups(), ", "), other = absl::StrJoin(want.left_groups(), ", ");
      left != other) {
    return absl::StrCat("left_groups (got [", left, "], want [", other, "])");
  }
  if (got.groups_size() != want.groups_size()) {
    return absl::StrCat("number of optimizer groups (got ", got.groups_size(), ", want ", want.groups_size(), ")");
  }
  for (int g = 0; g < want.groups_size(); ++g) {
    if (got.groups(g).SerializeAsString() != want.groups(g).SerializeAsString()) {
      return absl::StrCat("optimizer group ", g, " (got {", got.groups(g).ShortDebugString(), "}, want {",
                          want.groups(g).ShortDebugString(), "})");
    }
  }
  return "";
}

}  // namespace shardd
