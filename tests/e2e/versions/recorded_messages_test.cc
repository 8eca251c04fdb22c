// Each message of proto/, with every field set, as releases have written it: this build reads the same.

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "shardd/v1/custody.pb.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/journal.pb.h"
#include "shardd/v1/model.pb.h"
#include "shardd/v1/peer.pb.h"
#include "shardd/v1/trainer.pb.h"
#include "tests/e2e/versions/records.h"

namespace shardd::e2e {
namespace {

namespace pb = google::protobuf;

// Sets every field to something else. Of each oneof the member number `variant`, counted around.
class Filler {
 public:
  explicit Filler(int variant) : variant_(variant) {}

  void Fill(pb::Message* message, int depth = 0) {
    const pb::Descriptor& type = *message->GetDescriptor();
    for (int i = 0; i < type.field_count(); ++i) {
      const pb::FieldDescriptor* const field = type.field(i);
      const pb::OneofDescriptor* const oneof = field->real_containing_oneof();
      if (oneof != nullptr && oneof->field((depth == 0 ? variant_ : number_) % oneof->field_count()) != field) continue;
      if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE && depth >= kDepth) continue;
      if (field->is_map()) continue;  // there is none; the order of its entries would be anybody's
      for (int k = 0; k < (field->is_repeated() ? 2 : 1); ++k) Set(message, field, depth);
    }
  }

 private:
  static constexpr int kDepth = 4;

  void Set(pb::Message* message, const pb::FieldDescriptor* field, int depth) {
    const pb::Reflection& of = *message->GetReflection();
    const int n = ++number_;
    const int sign = n % 3 == 0 ? -1 : 1;
    const auto put = [&](auto set, auto add, auto value) {
      if (field->is_repeated()) {
        (of.*add)(message, field, value);
      } else {
        (of.*set)(message, field, value);
      }
    };
    using R = pb::Reflection;
    switch (field->cpp_type()) {
      case pb::FieldDescriptor::CPPTYPE_INT32:
        return put(&R::SetInt32, &R::AddInt32, sign * n);
      case pb::FieldDescriptor::CPPTYPE_INT64:
        return put(&R::SetInt64, &R::AddInt64, int64_t{sign} * n << 33);
      case pb::FieldDescriptor::CPPTYPE_UINT32:
        return put(&R::SetUInt32, &R::AddUInt32, static_cast<uint32_t>(n));
      case pb::FieldDescriptor::CPPTYPE_UINT64:
        return put(&R::SetUInt64, &R::AddUInt64, static_cast<uint64_t>(n) << 33);
      case pb::FieldDescriptor::CPPTYPE_DOUBLE:
        return put(&R::SetDouble, &R::AddDouble, n + 0.25);
      case pb::FieldDescriptor::CPPTYPE_FLOAT:
        return put(&R::SetFloat, &R::AddFloat, static_cast<float>(n) + 0.5F);
      case pb::FieldDescriptor::CPPTYPE_BOOL:
        return put(&R::SetBool, &R::AddBool, true);
      case pb::FieldDescriptor::CPPTYPE_ENUM:
        return put(&R::SetEnumValue, &R::AddEnumValue,
                   field->enum_type()->value(field->enum_type()->value_count() - 1)->number());
      case pb::FieldDescriptor::CPPTYPE_STRING:
        return put(&R::SetString, &R::AddString, absl::StrCat("s", n));
      case pb::FieldDescriptor::CPPTYPE_MESSAGE:
        return Fill(field->is_repeated() ? of.AddMessage(message, field) : of.MutableMessage(message, field),
                    depth + 1);
    }
  }

  const int variant_;
  int number_ = 0;
};

std::unique_ptr<pb::Message> Make(const std::string& name) {
  const pb::Descriptor* const type = pb::DescriptorPool::generated_pool()->FindMessageTypeByName(name);
  return type == nullptr
             ? nullptr
             : std::unique_ptr<pb::Message>(pb::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

// "message <full name> <hex>", then "means <text>".
std::string AllMessages() {
  std::string text;
  for (const pb::FileDescriptor* file :
       {v1::JobSpec::descriptor()->file(), v1::OpenJobRequest::descriptor()->file(), v1::Daemon::descriptor()->file(),
        v1::PeerHello::descriptor()->file(), v1::CommittedRecord::descriptor()->file(),
        v1::CustodyJob::descriptor()->file()}) {
    for (int i = 0; i < file->message_type_count(); ++i) {
      const pb::Descriptor& type = *file->message_type(i);
      int variants = 1;
      for (int k = 0; k < type.real_oneof_decl_count(); ++k) {
        variants = std::max(variants, type.oneof_decl(k)->field_count());
      }
      for (int variant = 0; variant < variants; ++variant) {
        const std::unique_ptr<pb::Message> message = Make(type.full_name());
        Filler(variant).Fill(message.get());
        absl::StrAppend(&text, "message ", type.full_name(), " ", absl::BytesToHexString(message->SerializeAsString()),
                        "\nmeans ", message->ShortDebugString(), "\n");
      }
    }
  }
  return text;
}

class RecordedMessages : public ::testing::TestWithParam<std::string> {};

TEST_P(RecordedMessages, AreReadAsTheyWereMeant) {
  int read = 0;
  std::unique_ptr<pb::Message> got;
  for (const Line& line : Lines(Recorded(GetParam(), "messages.txt", AllMessages))) {
    if (line.word(0) == "message") {
      got = Make(line.word(1));
      ASSERT_NE(got, nullptr) << line.word(1) << " is gone";
      ASSERT_TRUE(got->ParseFromString(line.bytes(2))) << line.word(1);
      continue;
    }
    const std::unique_ptr<pb::Message> want(got->New());
    const std::string text = absl::StrJoin(line.words.begin() + 1, line.words.end(), " ");
    ASSERT_TRUE(pb::TextFormat::ParseFromString(text, want.get())) << got->GetTypeName() << " " << text;
    pb::util::MessageDifferencer differences;
    std::string found;
    differences.ReportDifferencesToString(&found);
    EXPECT_TRUE(differences.Compare(*want, *got)) << got->GetTypeName() << " is read otherwise:\n" << found;
    ++read;
  }
  EXPECT_GT(read, 100);
}

INSTANTIATE_TEST_SUITE_P(Of, RecordedMessages, ::testing::ValuesIn(RecordedVersions()),
                         [](const auto& info) { return VersionName(info.param); });

}  // namespace
}  // namespace shardd::e2e
