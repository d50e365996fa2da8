//! Rates: how often jobs may start.

use std::{fmt, str::FromStr, time::Duration};

use super::InvalidSetting;

/// Without a burst, starts are at least this far apart: an assignment takes some milliseconds to become a start.
const SLOWEST_WITHOUT_BURST: Duration = Duration::from_millis(100);
/// A burst covers at least this time at its rate.
const SHORTEST_BURST: Duration = Duration::from_millis(20);
/// A burst covers at most this time at its rate.
const LONGEST_BURST: Duration = Duration::from_secs(366 * 86_400);

/// At most `burst + starts / per · T` starts in any period of length T.
///
/// This is the generic cell rate algorithm (ITU-T I.371): each start takes the next *cell* of a clock that ticks every `per / starts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rate {
    /// Number of starts in each period.
    pub starts: u32,
    /// The period.
    pub per: Duration,
    /// How many starts may follow each other at once.
    pub burst: u32,
}

impl Rate {
    /// The time between two starts at this rate, rounded up to nanoseconds.
    pub fn interval(self) -> Duration {
        let nanos = self.per.as_nanos().div_ceil(u128::from(self.starts.max(1)));
        u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos)
    }

    /// A rate.
    ///
    /// # Errors
    /// When a number is zero or too large, the period is not between 1 ms and 30 days, or the burst covers less than 20 ms or more than a year
    /// at this rate. Without a burst, starts must be at least 100 ms apart.
    pub fn new(starts: u32, per: Duration, burst: u32) -> Result<Self, InvalidSetting> {
        let refused = |problem: String| Err(InvalidSetting(problem));
        if starts == 0 || burst == 0 {
            return refused("a rate and its burst must be at least 1".into());
        }
        if per < Duration::from_millis(1) || per > Duration::from_secs(30 * 86_400) {
            return refused(format!("the period of a rate must be from 1ms to 30days, not {}", humantime::format_duration(per)));
        }
        if starts > 1_000_000 || burst > 1_000_000 || per / starts < Duration::from_micros(1) {
            return refused("a rate and its burst must be at most 1000000, and a rate at most one start in a microsecond".into());
        }
        let rate = Self { starts, per, burst };
        if burst == 1 && rate.interval() < SLOWEST_WITHOUT_BURST {
            return refused(format!(
                "a rate of more than one start in 100ms needs a burst of at least 2: `{starts}/{}`",
                humantime::format_duration(per)
            ));
        }
        let covered = rate.interval() * (burst - 1);
        if burst > 1 && covered < SHORTEST_BURST {
            let needed = SHORTEST_BURST.as_nanos().div_ceil(rate.interval().as_nanos()) + 1;
            return refused(format!("a burst of {burst} is over before an assignment arrives; use a burst of at least {needed}"));
        }
        if covered > LONGEST_BURST {
            return refused("a burst must not cover more than a year at its rate".into());
        }
        Ok(rate)
    }
}

/// `100/1s`, or `100/1s burst 20`. Without `burst`, the burst is the number of starts in a period.
impl FromStr for Rate {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let example = || InvalidSetting(format!("`{text:.80}` is not a rate; write it like `100/1s`, or `100/1s burst 20`"));
        let (starts, rest) = text.split_once('/').ok_or_else(example)?;
        let (per, burst) = rest.split_once(" burst ").map_or((rest, None), |(per, burst)| (per, Some(burst)));
        let number = |text: &str| text.trim().parse().map_err(|_| example());
        let starts = number(starts)?;
        let per = humantime::parse_duration(per.trim()).map_err(|_| example())?;
        Self::new(starts, per, burst.map_or(Ok(starts), number)?)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} burst {}", self.starts, humantime::format_duration(self.per), self.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_as_it_is_written() {
        for text in ["100/1s burst 20", "1/1m burst 1", "5/1h 30m burst 7", "10/1s burst 1", "1000/1s burst 21"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        assert_eq!("100/1s".parse::<Rate>().unwrap(), Rate { starts: 100, per: Duration::from_secs(1), burst: 100 });
        for wrong in [
            "",
            "100",
            "0/1s",
            "1/0s",
            "1/1s burst 0",
            "-1/1s",
            "1/31days",
            "2000000/1s",
            "1/1s burst",
            "x/1s",
            "11/1s burst 1",
            "1000/1s burst 20",
            "1/30days burst 14",
        ] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
        assert_eq!("100/1s".parse::<Rate>().unwrap().interval(), Duration::from_millis(10));
    }
}
