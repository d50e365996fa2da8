//! Events: what happens to jobs and workers, for subscribers.
//!
//! The processes publish an event only if a subscriber has asked for its topic. A subscriber keeps an entry in `metadata` (the document
//! `subscribers`) that names its topics and expires if it is not renewed. A process that has something to tell reads this document once a
//! second at most, and keeps what it tells until it has read it. So a subscriber gets events within a second after it has subscribed, and
//! without a subscriber the processes write nothing.
//!
//! Events are for people and dashboards. They are never the truth: each is acknowledged by the primary only, and dropped when too many wait.
//! Each process numbers its events, so a reader detects the number of those that it missed. `events` is a capped collection, and a reader
//! may begin with what it still holds.
//!
//! The ids of ended jobs are published in the same way, for [`wait`](crate::wait).
//!
//! | file | content |
//! |---|---|
//! | `event` | an event, and what subscribers ask for |
//! | `tell` | what becomes an event |
//! | `publisher` | keeps events until they are written |
//! | `publish` | writes them |
//! | `stream` | the reader |
//! | `subscribers` | the collection of events, and the document that names the subscribers |

mod event;
mod publish;
mod publisher;
mod stream;
pub(crate) mod subscribers;
mod tell;

pub(crate) use self::subscribers::RingPart;
pub use self::{
    event::Event,
    publish::flush,
    stream::{Events, EventsError, Received},
};
pub(crate) use self::{event::Wanted, stream::RENEW_EVERY, tell::ToldJob};
