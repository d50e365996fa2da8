"""The rows of `compare --ordinary`: few slots and jobs of some milliseconds, as in `recruiter bench ordinary`."""

from dataclasses import dataclass

PROCESSES, SLOTS_EACH = 2, 10
SLOTS = PROCESSES * SLOTS_EACH
# As in `recruiter bench ordinary`: where the slots are the limit, all systems get the same jobs.
IDEAL_SECONDS = 3.0
# Where the system is the limit.
SECONDS = 5.0
TRIAL_SECONDS = 1.0  # to find the best settings of a row
PROBE = 4_000  # jobs that do nothing; their rate is the first thing that is known of a system
FEWEST = 100  # one of them is long


@dataclass(frozen=True)
class Load:
    """The jobs of one row. One in a hundred takes `long_ms` instead, if that is given."""

    ms: int
    long_ms: int = 0

    def __str__(self):
        return f"{self.ms} ms" + (f", 1 in 100 of {self.long_ms:,} ms" if self.long_ms else "")

    @property
    def mean(self):
        """Seconds."""
        return (0.99 * self.ms + 0.01 * self.long_ms if self.long_ms else self.ms) / 1000

    @property
    def ideal(self):
        """Jobs a second if no slot were ever idle."""
        return SLOTS / self.mean if self.mean else None

    def expected(self, idle_rate):
        """Jobs a second of a system that does so many jobs of no work a second; rather too few."""
        return SLOTS / (self.mean + SLOTS / idle_rate)

    def jobs(self, rate, scale=1.0):
        """Jobs of a row, for a system that does so many of them a second."""
        most = self.ideal * IDEAL_SECONDS if self.ideal else float("inf")
        return max(FEWEST, int(min(rate * SECONDS, most) * scale))

    def trial_jobs(self, rate, scale=1.0):
        return max(FEWEST, int(rate * TRIAL_SECONDS * scale))

    def counted(self, jobs):
        """The time is that until so many jobs are completed: as many as there are short ones."""
        return jobs - jobs // 100 if self.long_ms else jobs


IDLE = Load(0)
LOADS = [IDLE, Load(1), Load(5), Load(20), Load(100), Load(5, long_ms=2_000)]
