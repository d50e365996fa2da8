//! The outcomes of the items of a running bundle, and which of them are not written yet.
//!
//! A bundle does not wait until its progress is written. While MongoDB is unreachable, its items continue as long as the lease holds. Their
//! outcomes are written later, or with the end of the bundle, which contains all outcomes.

use std::{collections::BTreeSet, sync::Arc};

use bson::Bson;
use parking_lot::Mutex;
use recruiter_common::{
    job::{
        Claim,
        bundle::{Bundle, is_pending},
    },
    store::{Progress, Recorded},
};

use crate::cancellation::{Cancel, Cancellation};

/// If fewer than one in this number of items has a new outcome, the outcomes are written one by one. Otherwise the whole list is written,
/// which then costs less.
const FEW: usize = 8;

/// The outcomes of the items of a running bundle, shared by the bundle and the recorder.
pub(crate) struct Items {
    claim: Claim,
    cancel: Arc<Cancel>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// In the form in which they are stored.
    outcomes: Vec<Bson>,
    /// Whether the stored document has a list of this length.
    has_list: bool,
    /// The items with outcomes that no write contains yet.
    unwritten: BTreeSet<usize>,
    /// The items of the write that is not answered yet.
    in_flight: BTreeSet<usize>,
    /// Whether the recorder has this bundle in its queue.
    is_queued: bool,
    /// Whether the end of the bundle writes all further outcomes.
    is_closed: bool,
}

impl Items {
    pub(crate) fn new(claim: Claim, bundle: &Bundle, cancel: Arc<Cancel>) -> Self {
        let known = Known { outcomes: bundle.outcomes.clone(), has_list: bundle.has_list, ..Known::default() };
        Self { claim, cancel, known: Mutex::new(known) }
    }

    /// The indexes of the pending items.
    pub(crate) fn remaining(&self) -> Vec<usize> {
        self.known.lock().outcomes.iter().enumerate().filter(|(_, outcome)| is_pending(outcome)).map(|(index, _)| index).collect()
    }

    /// Reads all outcomes.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&[Bson]) -> T) -> T {
        read(&self.known.lock().outcomes)
    }

    /// Notes the outcome of an item. Returns whether the bundle must be put into the recorder's queue.
    pub(crate) fn note(&self, index: usize, outcome: Bson) -> bool {
        let mut known = self.known.lock();
        known.outcomes[index] = outcome;
        known.unwritten.insert(index);
        !std::mem::replace(&mut known.is_queued, true)
    }

    /// Ends the progress writes: the end of the bundle writes all outcomes that no write contains yet.
    pub(crate) fn close(&self) {
        self.known.lock().is_closed = true;
    }

    /// Removes the bundle from the recorder's queue if there is nothing to write. Returns whether it was removed.
    pub(crate) fn leave_queue(&self) -> bool {
        let mut known = self.known.lock();
        known.is_queued = !known.is_closed && !known.unwritten.is_empty();
        !known.is_queued
    }

    /// The next write.
    pub(crate) fn to_write(&self) -> Progress {
        let mut known = self.known.lock();
        known.in_flight = std::mem::take(&mut known.unwritten);
        let is_few = known.in_flight.len() * FEW < known.outcomes.len();
        if known.has_list && is_few {
            Progress::of_items(self.claim, known.in_flight.iter().map(|index| (*index, known.outcomes[*index].clone())))
        } else {
            Progress::whole(self.claim, &known.outcomes)
        }
    }

    /// Handles the answer to the last write. If MongoDB refused it, the end of the bundle writes its outcomes. A bundle that has lost its
    /// claim is cancelled.
    pub(crate) fn written(&self, recorded: Recorded) {
        let mut known = self.known.lock();
        known.in_flight.clear();
        match recorded {
            Recorded::Yes => known.has_list = true,
            Recorded::ClaimLost => {
                known.is_closed = true;
                self.cancel.cancel(Cancellation::ClaimLost);
            }
            Recorded::Refused => {}
        }
    }

    /// Notes that the last write failed or has an unknown outcome. Its outcomes are written again.
    pub(crate) fn not_written(&self) {
        let mut known = self.known.lock();
        let mut again = std::mem::take(&mut known.in_flight);
        known.unwritten.append(&mut again);
    }
}
