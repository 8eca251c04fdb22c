// What is kept of jobs in files, and who may read it, also behind a kill in the middle of a line.

#include "server/history/history.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/testing/files.h"
#include "tests/testing/poll.h"
#include "tests/testing/run_as_uid.h"

namespace shardd {
namespace {

constexpr int64_t kMostBytes = 16 << 20;
const Tenant kAlice = {1000, std::nullopt};
const Tenant kBob = {1001, std::nullopt};

class HistoryTest : public ::testing::Test {
 protected:
  std::string Folder() const { return dir_.path() + "/history"; }
  std::unique_ptr<History> Open() const { return *History::Open(Folder(), kMostBytes); }
  static v1::ListHistoryResponse List(History& history, const v1::ListHistoryRequest& request, uint32_t uid,
                                      bool is_admin = false) {
    v1::ListHistoryResponse response;
    absl::Notification done;
    history.List(request, uid, is_admin, [&](v1::ListHistoryResponse listed) {
      response = std::move(listed);
      done.Notify();
    });
    done.WaitForNotification();
    return response;
  }
  static v1::ListHistoryRequest Of(const std::string& job) {
    v1::ListHistoryRequest request;
    request.set_job(job);
    return request;
  }
  static v1::Event Event(const std::string& job, const std::string& kind, const std::string& text = "why") {
    v1::Event event;
    event.set_job(job);
    event.set_unix_us(absl::ToUnixMicros(absl::Now()));
    event.set_kind(kind);
    event.set_text(text);
    event.set_rank(-1);
    return event;
  }
  static v1::HistoryStep Step(int64_t step, absl::Duration took) {
    v1::HistoryStep result;
    result.mutable_times()->set_step(step);
    result.mutable_times()->set_duration_ns(absl::ToInt64Nanoseconds(took));
    result.mutable_times()->set_slowest_rank(-1);
    result.set_grad_norm(static_cast<double>(step));
    return result;
  }
  static void Write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::app | std::ios::binary) << bytes;
  }

  const testing::TempDir dir_;
};

TEST_F(HistoryTest, EventsAndStepsAreThereForTheNextDaemon) {
  {
    const std::unique_ptr<History> history = Open();
    history->KeepEvent(Event("job", "open"), kAlice);
    history->KeepStep("job", kAlice, Step(1, absl::Milliseconds(150)));
    history->KeepEvent(Event("job", "abort", "rank 1 is lost"), kAlice);
  }
  const std::unique_ptr<History> next = Open();
  const v1::ListHistoryResponse listed = List(*next, Of("job"), kAlice.uid);
  ASSERT_EQ(listed.lines_size(), 3);
  EXPECT_EQ(listed.lines(0).event().kind(), "open");
  EXPECT_EQ(listed.lines(1).step().times().step(), 1);
  EXPECT_EQ(listed.lines(1).step().grad_norm(), 1);
  EXPECT_EQ(listed.lines(2).event().text(), "rank 1 is lost");
  EXPECT_FALSE(listed.more());
}

TEST_F(HistoryTest, ShortStepsShareALine) {
  const std::unique_ptr<History> history = Open();
  for (int step = 1; step <= 50; ++step) history->KeepStep("job", kAlice, Step(step, absl::Microseconds(10)));
  history->KeepEvent(Event("job", "abort"), kAlice);
  const v1::ListHistoryResponse listed = List(*history, Of("job"), kAlice.uid);
  ASSERT_GE(listed.lines_size(), 2);
  ASSERT_LE(listed.lines_size(), 5) << "a machine that stands still cuts it";
  int64_t steps = 0;
  int64_t ns = 0;
  for (const v1::HistoryLine& line : listed.lines()) {
    steps += line.step().steps();
    ns += line.step().times().duration_ns();
  }
  EXPECT_EQ(steps, 50);
  EXPECT_EQ(ns, 50 * 10'000);
  const v1::HistoryLine& last_steps = listed.lines(listed.lines_size() - 2);
  EXPECT_EQ(last_steps.step().times().step(), 50);
  EXPECT_EQ(listed.lines().rbegin()->event().kind(), "abort") << "behind the steps before it";
}

TEST_F(HistoryTest, WhoAsksSeesTheLastSteps) {
  const std::unique_ptr<History> history = Open();
  history->KeepStep("job", kAlice, Step(7, absl::Microseconds(10)));
  EXPECT_EQ(List(*history, Of("job"), kAlice.uid).lines_size(), 1);
}

TEST_F(HistoryTest, AnotherUserSeesNothingAndSecretsAreTheAdministrators) {
  const std::unique_ptr<History> history = Open();
  history->KeepEvent(Event("job", "open"), kAlice);
  Tenant with_secret = kAlice;
  with_secret.secret.emplace();
  history->KeepEvent(Event("hidden", "open"), with_secret);
  history->KeepEvent(Event("other", "open"), kBob);
  EXPECT_EQ(List(*history, {}, kAlice.uid).lines_size(), 1);
  EXPECT_EQ(List(*history, {}, kBob.uid).lines_size(), 1);
  EXPECT_EQ(List(*history, Of("job"), kBob.uid).lines_size(), 0);
  EXPECT_EQ(List(*history, {}, 0, /*is_admin=*/true).lines_size(), 3);
  v1::ListHistoryRequest of_bob;
  of_bob.set_uid(kBob.uid);
  EXPECT_EQ(List(*history, of_bob, 0, /*is_admin=*/true).lines_size(), 1);
}

TEST_F(HistoryTest, TheNewestLinesAreShownOldestFirst) {
  const std::unique_ptr<History> history = Open();
  for (int i = 0; i < 10; ++i) history->KeepEvent(Event("job", "departure", absl::StrCat(i)), kAlice);
  v1::ListHistoryRequest request = Of("job");
  request.set_limit(3);
  const v1::ListHistoryResponse listed = List(*history, request, kAlice.uid);
  ASSERT_EQ(listed.lines_size(), 3);
  EXPECT_EQ(listed.lines(0).event().text(), "7");
  EXPECT_EQ(listed.lines(2).event().text(), "9");
  EXPECT_TRUE(listed.more());
  request.set_since_unix_ms(absl::ToUnixMillis(absl::Now() + absl::Hours(1)));
  EXPECT_EQ(List(*history, request, kAlice.uid).lines_size(), 0);
}

TEST_F(HistoryTest, HalfALineIsPassedOver) {
  Open()->KeepEvent(Event("job", "open"), kAlice);
  Write(Folder() + "/history.jsonl", R"({"timeUnixMs":"17, "job":"jo)");  // a kill
  const std::unique_ptr<History> next = Open();
  next->KeepEvent(Event("job", "attach"), kAlice);
  EXPECT_EQ(List(*next, Of("job"), kAlice.uid).lines_size(), 2);
}

TEST_F(HistoryTest, FilesHaveAnEndAndTheOldestGo) {
  const std::string text(900, 'x');
  HistoryFiles files = *HistoryFiles::Open(Folder(), 2 * HistoryFiles::kFullBytes);
  std::string random;  // that cannot be compressed much
  uint32_t seed = 1;
  for (int i = 0; i < 9; ++i) {
    random.clear();
    while (random.size() < HistoryFiles::kFullBytes) {
      for (int c = 0; c < 900; ++c)
        random.push_back(static_cast<char>('!' + (seed = seed * 1664525 + 1013904223) / 50'000'000));
      absl::StrAppend(&random, i, "\n");
    }
    ASSERT_TRUE(files.Append(random).ok());
  }
  int64_t lines = 0;
  std::string newest;
  EXPECT_TRUE(HistoryFiles::ReadBackwards(Folder(), [&](absl::string_view line) {
    if (lines++ == 0) newest = std::string(line.substr(line.size() - 1));
    return true;
  }));
  EXPECT_EQ(newest, "8");
  EXPECT_GT(lines, 4000) << "of a file at least";
  EXPECT_LT(lines, 3 * 4700) << "not of all nine";
}

TEST_F(HistoryTest, AnUnreadableFileIsNotTakenForAnEmptyOne) {
  HistoryFiles files = *HistoryFiles::Open(Folder(), kMostBytes);
  ASSERT_EQ(unlink((Folder() + "/history.jsonl").c_str()), 0);
  EXPECT_FALSE(files.Append(std::string(HistoryFiles::kFullBytes, 'a') + "\n").ok());
  EXPECT_NE(access((Folder() + "/history-000001.jsonl.zst").c_str(), F_OK), 0);
  ASSERT_TRUE(files.Append("again\n").ok()) << "in a file that is there";
  int lines = 0;
  EXPECT_TRUE(HistoryFiles::ReadBackwards(Folder(), [&](absl::string_view) { return ++lines < 100; }));
  EXPECT_EQ(lines, 1);
}

TEST_F(HistoryTest, DamagedFilesArePassedOver) {
  HistoryFiles files = *HistoryFiles::Open(Folder(), kMostBytes);
  ASSERT_TRUE(files.Append(std::string(HistoryFiles::kFullBytes, 'a') + "\n").ok());
  ASSERT_TRUE(files.Append("newest\n").ok());
  Write(Folder() + "/history-000002.jsonl.zst", "no frame of zstd");
  int lines = 0;
  EXPECT_TRUE(HistoryFiles::ReadBackwards(Folder(), [&](absl::string_view) { return ++lines < 100; }));
  EXPECT_EQ(lines, 2);
}

TEST_F(HistoryTest, AFileThatStaysHoldsNothingUp) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
  HistoryFiles files = *HistoryFiles::Open(Folder(), kMostBytes);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(files.Append(std::string(HistoryFiles::kFullBytes, 'a') + "\n").ok());
  }
  ASSERT_TRUE(files.Append("newest\n").ok());
  const std::vector<int64_t> numbers = HistoryNumbers(Folder());
  ASSERT_EQ(numbers.size(), 2u);
  chmod(dir_.path().c_str(), 0755);
  chmod(Folder().c_str(), 0755);
  for (const int64_t number : numbers) chmod(HistoryPath(Folder(), number).c_str(), 0644);
  // Who may read the files and not remove them.
  testing::RunAsUid(12345, [&] { HistoryRoom().Make(Folder(), /*most_bytes=*/0, HistoryFiles::kFullBytes); });
  EXPECT_EQ(HistoryNumbers(Folder()), numbers);
  HistoryRoom().Make(Folder(), 0, HistoryFiles::kFullBytes);
  EXPECT_TRUE(HistoryNumbers(Folder()).empty()) << "who may";
}

// Lines of files, the newest first.
std::vector<std::string> LinesOf(const std::string& folder) {
  std::vector<std::string> lines;
  HistoryFiles::ReadBackwards(folder, [&](absl::string_view line) {
    lines.emplace_back(line);
    return true;
  });
  return lines;
}

// No file of this process grows beyond so many bytes meanwhile, as where a disk is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : before_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit full{bytes, limit_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &full);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &limit_);
    signal(SIGXFSZ, before_);
  }

 private:
  rlimit limit_{};
  sighandler_t before_;
};

TEST_F(HistoryTest, AFullDiskCostsLinesWithoutRoomAlone) {
  HistoryFiles files = *HistoryFiles::Open(Folder(), kMostBytes);
  ASSERT_TRUE(files.Append("before\n").ok());
  {
    const FullDisk full(10);
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = files.Append("no room\n");
      EXPECT_TRUE(absl::StrContains(status.message(), Folder() + "/history.jsonl")) << status;
    }
    EXPECT_TRUE(HistoryFiles::Open(Folder(), kMostBytes).ok()) << "a daemon that is started then";
  }
  ASSERT_TRUE(files.Append("behind\n").ok());
  EXPECT_EQ(LinesOf(Folder()), (std::vector<std::string>{"behind", "no ", "before"}));
}

TEST_F(HistoryTest, WhatCannotBeCompressedDoesNotGrow) {
  HistoryFiles files = *HistoryFiles::Open(Folder(), kMostBytes);
  const std::string in_the_way = Folder() + "/history-000001.jsonl.zst.tmp";
  ASSERT_EQ(mkdir(in_the_way.c_str(), 0700), 0);
  EXPECT_FALSE(files.Append(std::string(HistoryFiles::kFullBytes, 'a') + "\n").ok());
  EXPECT_FALSE(files.Append("no room\n").ok());
  struct stat object {};
  ASSERT_EQ(stat((Folder() + "/history.jsonl").c_str(), &object), 0);
  EXPECT_EQ(object.st_size, HistoryFiles::kFullBytes + 1);
  ASSERT_EQ(rmdir(in_the_way.c_str()), 0);
  {
    const FullDisk full(10);
    EXPECT_FALSE(HistoryFiles::Open(Folder(), kMostBytes)->Append("no room\n").ok());
  }
  EXPECT_EQ(access(in_the_way.c_str(), F_OK), -1) << "half of a file takes no room";
  ASSERT_TRUE(testing::PollUntil([&] { return files.Append("again\n").ok(); }));
  ASSERT_EQ(LinesOf(Folder()).size(), 2u);
  EXPECT_EQ(LinesOf(Folder())[0], "again");
}

// Bob has a job whose name looks like Alice's uid, and steps without end.
TEST_F(HistoryTest, AUsersFloodCostsAnotherUserNoLine) {
  constexpr int64_t kRoom = 2 * HistoryFiles::kFullBytes;
  HistoryFiles files = *HistoryFiles::Open(Folder(), kRoom);
  std::mt19937_64 random(1);
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
    std::string text = absl::StrCat(R"({"job":"a","uid":1000,"step":)", round, "}\n");
    for (int i = 0; text.size() < HistoryFiles::kFullBytes; ++i) {
      absl::StrAppend(&text, R"({"job":"\",\"uid\":1000,\"","uid":1001,"step":)", round, R"(,"text":")");
      for (int word = 0; word < 50; ++word) absl::StrAppend(&text, absl::Hex(random()));
      text += "\"}\n";
    }
    ASSERT_TRUE(files.Append(text).ok());
  }
  int alices = 0;
  std::string newest_of_bob;
  for (const std::string& line : LinesOf(Folder())) {
    if (absl::StrContains(line, R"("job":"a")")) {
      EXPECT_TRUE(absl::StrContains(line, absl::StrCat("\"step\":", kRounds - 1 - alices, "}"))) << line;
      ++alices;
    } else if (newest_of_bob.empty()) {
      newest_of_bob = line;
    }
  }
  EXPECT_EQ(alices, kRounds);
  EXPECT_TRUE(absl::StrContains(newest_of_bob, absl::StrCat("\"step\":", kRounds - 1, ",")));
  int64_t bytes = 0;
  const std::vector<int64_t> numbers = HistoryNumbers(Folder());
  for (const int64_t number : numbers) bytes += ReadHistoryFile(HistoryPath(Folder(), number)).size();
  EXPECT_LE(bytes, kRoom - HistoryFiles::kFullBytes);
  EXPECT_LE(numbers.size(), 3u) << "what is left of files is joined";
}

TEST_F(HistoryTest, WhereNothingCanBeWrittenTheErrorNamesThePath) {
  const absl::Status status = History::Open("/proc/none", kMostBytes).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "/proc/none")) << status;
  EXPECT_TRUE(absl::StrContains(History::Open(Folder(), 5).status().message(), "got 5")) << "too little room";
}

}  // namespace
}  // namespace shardd
