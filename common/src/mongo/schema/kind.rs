//! The collections by their names, and what makes each kind of them.

use bson::{Document, doc};

use super::validators::{
    groups_validator, limits_validator, messages_validator, pauses_validator, scheduled_validator, schedulers_validator,
};
use crate::mongo::channel::Channel;

/// The name of the collection of messages.
pub(crate) const MESSAGES: &str = "messages";
/// The name of the collection of the audit.
pub(crate) const AUDIT: &str = "audit";
/// The name of the ring of events.
pub(crate) const EVENTS: &str = "events";
/// Size of a collection of hints: some minutes of hints on a busy system. A hint is useless after a second.
pub(crate) const SIGNALS_BYTES: i64 = 16 * 1024 * 1024;

/// The kind of a collection, which decides its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Has [`scheduled_validator`].
    Jobs,
    /// Has the validator of `limits`.
    Limits,
    /// Has the validator of `groups`.
    Groups,
    /// Has the validator of `pauses`.
    Pauses,
    /// Has [`schedulers_validator`].
    Schedules,
    /// Has the validator of `messages`, and is made with the first publisher or subscriber.
    Messages,
    /// Is capped.
    Hints,
    /// Is capped, and made with the first subscriber.
    Events,
    Plain,
    /// The first insert makes it.
    Later,
}

/// Every collection, and the first channel. Each further channel has its number in place of the 0.
pub(crate) const COLLECTIONS: [(&str, Kind); 17] = [
    ("scheduled", Kind::Jobs),
    ("archived", Kind::Plain),
    ("roster", Kind::Plain),
    ("metadata", Kind::Plain),
    ("limits", Kind::Limits),
    ("groups", Kind::Groups),
    ("pauses", Kind::Pauses),
    ("schedulers", Kind::Schedules),
    ("unique_periods", Kind::Plain),
    (AUDIT, Kind::Plain),
    ("signals", Kind::Hints),
    ("signals_0", Kind::Hints),
    (EVENTS, Kind::Events),
    (MESSAGES, Kind::Messages),
    ("consumers", Kind::Later),
    ("payloads.files", Kind::Later),
    ("payloads.chunks", Kind::Later),
];

impl Kind {
    /// The kind of the collection of this name, without the prefix of the client; `None` if it is not one of ours.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let fixed = COLLECTIONS.iter().find(|(ours, _)| *ours == name).map(|(_, kind)| *kind);
        fixed.or_else(|| Channel::is_collection(name).then_some(Self::Hints))
    }

    pub(crate) fn options(self) -> Document {
        match (self, self.validator()) {
            (_, Some(validator)) => doc! { "validator": validator, "validationLevel": "moderate", "validationAction": "error" },
            (Self::Hints, None) => doc! { "capped": true, "size": SIGNALS_BYTES },
            (_, None) => doc! {},
        }
    }

    pub(crate) fn validator(self) -> Option<Document> {
        match self {
            Self::Jobs => Some(scheduled_validator()),
            Self::Limits => Some(limits_validator()),
            Self::Groups => Some(groups_validator()),
            Self::Pauses => Some(pauses_validator()),
            Self::Schedules => Some(schedulers_validator()),
            Self::Messages => Some(messages_validator()),
            Self::Hints | Self::Events | Self::Plain | Self::Later => None,
        }
    }
}
