#include "client/ctl/table.h"

#include <string>

#include "client/ctl/format.h"
#include "gtest/gtest.h"
#include "shardd/v1/jobs.pb.h"
#include "shardd/v1/model.pb.h"

namespace shardd::ctl {
namespace {

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table({{"JOB"}, {"STEP", Align::kRight}, {"STATE"}});
  table.AddRow({"gpt", "7", "idle"});
  table.AddRow({"a-longer-name", "123456", "waiting"});
  EXPECT_EQ(table.Render(false),
            "JOB              STEP  STATE\n"
            "gpt                 7  idle\n"
            "a-longer-name  123456  waiting\n");
}

TEST(TableTest, NoLineEndsInBlanks) {
  Table table({{"A"}, {"B"}});
  table.AddRow({"x", ""});
  table.AddRow({"x", "long"});
  EXPECT_EQ(table.Render(false), "A  B\nx\nx  long\n");
}

TEST(TableTest, WidthCountsCharactersNotBytes) {
  Table table({{"NAME"}, {"N", Align::kRight}});
  table.AddRow({"\xc3\xa4\xc3\xb6", "1"});
  table.AddRow({"abcde", "2"});
  EXPECT_EQ(table.Render(false), "NAME   N\n\xc3\xa4\xc3\xb6     1\nabcde  2\n");
}

TEST(TableTest, ColorsDoNotMoveColumnsAndAreAbsentWithoutColor) {
  Table table({{"STATE"}, {"N", Align::kRight}});
  table.AddRow({Cell("dead", Tone::kBad), "1"});
  EXPECT_EQ(table.Render(true), "\x1b[1mSTATE  N\x1b[0m\n\x1b[31mdead\x1b[0m   1\n");
  EXPECT_EQ(table.Render(false), "STATE  N\ndead   1\n");
}

TEST(TableTest, NamesCannotSteerTheTerminal) {
  Table table({{"NAME"}});
  table.AddRow({"a\x1b[2J\nb\x7f\xc2\x9bz"});
  EXPECT_EQ(table.Render(false), "NAME\na\\x1b[2J\\x0ab\\x7f\\xc2\x9bz\n");
  KeyValues values;
  values.Add("name", "\x1b]0;x");
  EXPECT_EQ(values.Render(false), "name  \\x1b]0;x\n");
}

TEST(TableTest, KeyValuesStandInOneColumn) {
  KeyValues values;
  values.Add("pid", "1");
  values.Add("huge pages", "none");
  EXPECT_EQ(values.Render(false), "pid         1\nhuge pages  none\n");
}

TEST(FormatTest, BytesAreMiB) {
  EXPECT_EQ(FormatMiB(0), "0.0 MiB");
  EXPECT_EQ(FormatMiB(1536 << 10), "1.5 MiB");
  EXPECT_EQ(FormatMiB(int64_t{3} << 30), "3072.0 MiB");
}

TEST(FormatTest, DurationsHaveTheUnitThatFits) {
  EXPECT_EQ(FormatMicros(0), "0 us");
  EXPECT_EQ(FormatMicros(850), "850 us");
  EXPECT_EQ(FormatMicros(12'345), "12.3 ms");
  EXPECT_EQ(FormatMillis(0), "0 ms");
  EXPECT_EQ(FormatMillis(4'500), "4.5 s");
  EXPECT_EQ(FormatMillis(200'000), "3 min 20 s");
  EXPECT_EQ(FormatMillis(7'500'000), "2 h 5 min");
  EXPECT_EQ(FormatMillis(int64_t{86'400'000} * 3 + 4 * 3'600'000), "3 d 4 h");
  EXPECT_EQ(FormatMillis(-1), "-");
}

TEST(FormatTest, LargeCountsCanBeRead) {
  EXPECT_EQ(FormatNumel(999'999), "999999");
  EXPECT_EQ(FormatNumel(10'816'512), "10816512 (10.8 M)");
  EXPECT_EQ(FormatNumel(7'000'000'000), "7000000000 (7.00 G)");
}

TEST(FormatTest, EnumNamesLoseTheirPrefix) {
  EXPECT_EQ(ShortEnumName(v1::JOB_STATE_FORWARD_BACKWARD), "forward_backward");
  EXPECT_EQ(ShortEnumName(v1::DTYPE_BFLOAT16), "bfloat16");
  EXPECT_EQ(ShortEnumName(v1::RANK_STATE_UNSPECIFIED), "unspecified");
  EXPECT_EQ(ShortEnumName(static_cast<v1::JobState>(99)), "unknown (99)");
}

}  // namespace
}  // namespace shardd::ctl
