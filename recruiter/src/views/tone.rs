//! How good or bad a state is: a colour beside its word.

use recruiter_common::job::Stage;

/// How good or bad a state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Good,
    Active,
    Warning,
    Bad,
}

impl Tone {
    /// `None`: the document is not a job.
    pub(crate) fn of_stage(stage: Option<Stage>) -> Self {
        match stage {
            Some(Stage::Waits | Stage::Postponed | Stage::Queued) => Self::Plain,
            Some(Stage::Running) => Self::Active,
            Some(Stage::Cancelling | Stage::Cancelled) => Self::Warning,
            Some(Stage::Done) => Self::Good,
            Some(Stage::Failed) | None => Self::Bad,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Good => "good",
            Self::Active => "active",
            Self::Warning => "warning",
            Self::Bad => "bad",
        }
    }
}
