//! Which jobs, in words: the flags of the commands, and the query of the HTTP API.

use std::{fmt::Display, time::Duration};

use clap::{
    Args,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _},
};
use recruiter_common::{
    JobFilter, StateFilter,
    flags::{name_of_text, value_of_text},
    instant::Instant,
    job::Stage,
    spec::{duration_of_text, instant_of_text},
};
use serde::{Deserialize, Deserializer, de::Error as _};
use utoipa::IntoParams;

/// The selection of jobs.
#[derive(Args, Clone, Debug, Default, Deserialize, IntoParams)]
#[command(next_help_heading = "Which jobs")]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FilterArgs {
    /// Jobs in this state
    #[arg(long, env = "RECRUITER_JOBS_STATE", value_name = "STATE", value_parser = PossibleValuesParser::new(State::words()).map(|word| State::of(&word)))]
    #[serde(deserialize_with = "state")]
    #[param(value_type = Option<String>)]
    state: Option<State>,
    /// Jobs of this group
    #[arg(long, env = "RECRUITER_JOBS_GROUP", value_name = "GROUP", value_parser = name_of_text)]
    #[serde(deserialize_with = "name")]
    group: Option<String>,
    /// Jobs of this class
    #[arg(long, env = "RECRUITER_JOBS_CLASS", value_name = "CLASS", value_parser = name_of_text)]
    #[serde(deserialize_with = "name")]
    class: Option<String>,
    /// Jobs with this tag
    #[arg(long, env = "RECRUITER_JOBS_TAG", value_name = "TAG", value_parser = value_of_text)]
    #[serde(deserialize_with = "value")]
    tag: Option<String>,
    /// Jobs with this urn
    #[arg(long, env = "RECRUITER_JOBS_URN", value_name = "URN", value_parser = value_of_text)]
    #[serde(deserialize_with = "value")]
    urn: Option<String>,
    /// Jobs archived with this finish reason, for example done or tried-too-many-times
    #[arg(long, env = "RECRUITER_JOBS_WHY", value_name = "WHY", value_parser = name_of_text)]
    #[serde(deserialize_with = "name")]
    why: Option<String>,
    /// Jobs whose last execution failed with this error class, for example exit:1 or timeout
    #[arg(long, env = "RECRUITER_JOBS_ERROR_CLASS", value_name = "CLASS", value_parser = name_of_text)]
    #[serde(deserialize_with = "name")]
    error_class: Option<String>,
    /// Jobs whose last failure message contains this text, ignoring case
    #[arg(long, env = "RECRUITER_JOBS_MESSAGE", value_name = "TEXT")]
    #[serde(deserialize_with = "text")]
    message: Option<String>,
    /// Archived jobs that ended, and other jobs enqueued, at this instant or later; 2h means two hours ago
    #[arg(long, env = "RECRUITER_JOBS_SINCE", value_name = "WHEN", value_parser = when_of_text)]
    #[serde(deserialize_with = "when")]
    #[param(value_type = Option<String>)]
    since: Option<When>,
    /// Archived jobs that ended, and other jobs enqueued, before this instant; 2h means two hours ago
    #[arg(long, env = "RECRUITER_JOBS_UNTIL", value_name = "WHEN", value_parser = when_of_text)]
    #[serde(deserialize_with = "when")]
    #[param(value_type = Option<String>)]
    until: Option<When>,
}

/// A state by which jobs are selected: waiting or archived, or one of the words that the lists show. (`running` is both.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Archived,
    Stage(Stage),
}

impl State {
    fn words() -> Vec<PossibleValue> {
        let more = [("waiting", "Waits, postponed or queued"), ("archived", "Done, cancelled or failed")];
        let more = more.map(|(word, help)| PossibleValue::new(word).help(help));
        Stage::ALL.iter().map(|stage| PossibleValue::new(stage.word())).chain(more).collect()
    }

    fn of(word: &str) -> Self {
        match Stage::ALL.into_iter().find(|stage| stage.word() == word) {
            Some(stage) => Self::Stage(stage),
            None if word == "archived" => Self::Archived,
            None => Self::Waiting,
        }
    }

    fn place(self) -> StateFilter {
        match self {
            Self::Waiting | Self::Stage(Stage::Waits | Stage::Postponed | Stage::Queued) => StateFilter::Waiting,
            Self::Stage(Stage::Running | Stage::Cancelling) => StateFilter::Running,
            Self::Archived | Self::Stage(Stage::Done | Stage::Cancelled | Stage::Failed) => StateFilter::Archived,
        }
    }

    /// The stage, if the place has others. All running jobs are `running`, those that are being cancelled too.
    fn stage(self) -> Option<Stage> {
        match self {
            Self::Waiting | Self::Archived | Self::Stage(Stage::Running) => None,
            Self::Stage(stage) => Some(stage),
        }
    }
}

// From a query.

/// An empty value is as none, as that of an empty variable.
fn read<'de, D: Deserializer<'de>, T, E: Display>(from: D, read: impl FnOnce(&str) -> Result<T, E>) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() { Ok(None) } else { read(&text).map(Some).map_err(D::Error::custom) }
}

fn state<'de, D: Deserializer<'de>>(from: D) -> Result<Option<State>, D::Error> {
    let known = State::words().iter().map(|word| word.get_name().to_owned()).collect::<Vec<_>>();
    read(from, |word| {
        let is_known = known.iter().any(|known| known == word);
        if is_known { Ok(State::of(word)) } else { Err(format!("`{word:.80}` is no state: write one of {}", known.join(", "))) }
    })
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    read(from, name_of_text)
}

fn value<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    read(from, value_of_text)
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    read(from, |text| Ok::<_, String>(text.to_owned()))
}

fn when<'de, D: Deserializer<'de>>(from: D) -> Result<Option<When>, D::Error> {
    read(from, when_of_text)
}

/// An instant, given as a date or as an age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    At(Instant),
    Ago(Duration),
}

impl When {
    pub(crate) fn by(self, now: Instant) -> Instant {
        match self {
            Self::At(at) => at,
            Self::Ago(ago) => chrono::TimeDelta::from_std(ago).ok().and_then(|ago| now.checked_sub_signed(ago)).unwrap_or_default(),
        }
    }
}

pub(crate) fn when_of_text(text: &str) -> Result<When, String> {
    let instant = instant_of_text(text).map(When::At);
    instant.or_else(|_| duration_of_text(text).map(When::Ago)).map_err(|_| {
        format!(
            "`{text:.80}` is neither an instant nor a duration; write it like 2030-01-31T18:00:00Z, or like 90m for an hour and a half ago"
        )
    })
}

impl FilterArgs {
    pub(crate) fn at(self, now: Instant) -> JobFilter {
        let Self { state, group, class, tag, urn, why, error_class, message, since, until } = self;
        let [since, until] = [since, until].map(|when| when.map(|when| when.by(now)));
        let (state, stage) = (state.map(State::place), state.and_then(State::stage).map(|stage| (stage, now)));
        let mut filter = JobFilter::default();
        (filter.state, filter.stage, filter.group, filter.class, filter.tag, filter.urn) = (state, stage, group, class, tag, urn);
        (filter.why, filter.error_class, filter.message, filter.since, filter.until) = (why, error_class, message, since, until);
        filter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_is_said_itself_or_by_how_long_ago_it_was() {
        let now = Instant::UNIX_EPOCH + chrono::TimeDelta::hours(5);
        let check = |text: &str, hours: i64| {
            assert_eq!(when_of_text(text).unwrap().by(now), Instant::UNIX_EPOCH + chrono::TimeDelta::hours(hours), "{text}");
        };
        check("1970-01-01T03:00:00Z", 3);
        check("1h", 4);
        check("5h", 0);
        assert!(when_of_text("noon").is_err_and(|problem| problem.contains("neither an instant nor a duration")));
    }
}
