//! Group commit of what became of items: while one write is on its way, further outcomes gather, those of all bundles of this
//! process. There is no delay but that.
//!
//! A bundle does not wait for it: with MongoDB away its items go on while the lease holds, and their outcomes are written when it is back or with the
//! bundle's end, which says them all again. A bundle whose claim turns out to be lost is asked to stop.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bson::Bson;
use recruiter_common::{
    job::{
        Claim,
        bundle::{Bundle, is_left},
    },
    shutdown::pause,
    store::{Progress, Recorded, Store},
    telemetry::chain,
};
use tokio::sync::{Notify, mpsc};

use crate::workable::{Cancel, Cancellation};

/// Bundles in one write, at most.
const BATCH: usize = 500;
/// Between attempts while MongoDB cannot be reached.
const PAUSE: Duration = Duration::from_millis(250);

/// Of a bundle, as a fraction of its items: so few outcomes are written one by one.
const FEW: usize = 8;
/// How long the end of a bundle waits for a write that is on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// Where bundles say that there is something to be written.
pub(crate) type Queue = mpsc::UnboundedSender<Arc<Record>>;

/// What became of the items of a bundle that runs.
pub(crate) struct Record {
    claim: Claim,
    cancel: Arc<Cancel>,
    known: Mutex<Known>,
    /// Told when a write has ended.
    written: Notify,
}

struct Known {
    /// As they are to be stored.
    outcomes: Vec<Bson>,
    /// Whether the document has a place for each of them.
    has_places: bool,
    /// What no acknowledged write has said.
    unwritten: BTreeSet<usize>,
    /// Whether the writer knows that there is something to be written.
    is_queued: bool,
    /// Whether a write is on its way.
    is_on_its_way: bool,
    /// Whether its end says the rest.
    is_closed: bool,
}

impl Record {
    pub(crate) fn new(claim: Claim, bundle: &Bundle, cancel: Arc<Cancel>) -> Self {
        let known = Known {
            outcomes: bundle.outcomes.clone(),
            has_places: bundle.has_places,
            unwritten: BTreeSet::new(),
            is_queued: false,
            is_on_its_way: false,
            is_closed: false,
        };
        Self { claim, cancel, known: Mutex::new(known), written: Notify::new() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The items that are still to be done.
    pub(crate) fn left(&self) -> Vec<usize> {
        self.known().outcomes.iter().enumerate().filter(|(_, outcome)| is_left(outcome)).map(|(index, _)| index).collect()
    }

    /// Looks at all outcomes.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&[Bson]) -> T) -> T {
        at(&self.known().outcomes)
    }

    /// Notes what became of an item, and has it written.
    pub(crate) fn note(self: &Arc<Self>, index: usize, outcome: Bson, queue: &Queue) {
        let mut known = self.known();
        known.outcomes[index] = outcome;
        known.unwritten.insert(index);
        if !std::mem::replace(&mut known.is_queued, true) {
            // Nobody writes any more when the process ends.
            let _ = queue.send(self.clone());
        }
    }

    /// Ends the writing: what is not written yet, the bundle's end says. It should not meet a write that is on its way, or one of
    /// the two has to begin again; a MongoDB that is away is not waited for here.
    pub(crate) async fn close(&self) {
        let written = self.written.notified();
        let is_on_its_way = {
            let mut known = self.known();
            known.is_closed = true;
            known.is_on_its_way
        };
        if is_on_its_way {
            let _ = tokio::time::timeout(ON_ITS_WAY, written).await;
        }
    }

    /// What is to be written, if anything is.
    fn to_write(&self) -> Option<(Progress, BTreeSet<usize>)> {
        let mut known = self.known();
        if known.is_closed || known.unwritten.is_empty() {
            known.is_queued = false;
            return None;
        }
        known.is_on_its_way = true;
        let indexes = std::mem::take(&mut known.unwritten);
        // To say everything costs less than to say where each of very many things belongs.
        let few = indexes.len() * FEW < known.outcomes.len();
        let progress = if known.has_places && few {
            Progress::of_items(self.claim, indexes.iter().map(|index| (*index, known.outcomes[*index].clone())))
        } else {
            Progress::whole(self.claim, &known.outcomes)
        };
        Some((progress, indexes))
    }

    /// Notes how a write ended: nothing when that is not known.
    fn wrote(&self, indexes: BTreeSet<usize>, recorded: Option<Recorded>) {
        let mut known = self.known();
        known.is_on_its_way = false;
        match recorded {
            Some(Recorded::Yes) => known.has_places = true,
            Some(Recorded::ClaimLost) => {
                known.is_closed = true;
                self.cancel.cancel(Cancellation::LeaseLost);
            }
            // The end of the bundle says it again.
            Some(Recorded::Refused) => {}
            None => known.unwritten.extend(indexes),
        }
        drop(known);
        self.written.notify_waiters();
    }
}

/// Writes outcomes of items until nobody can send any more and all are written.
pub(crate) async fn run(store: Store, mut queue: mpsc::UnboundedReceiver<Arc<Record>>) {
    let mut records = Vec::with_capacity(BATCH);
    loop {
        if records.is_empty() && queue.recv_many(&mut records, BATCH).await == 0 {
            return;
        }
        while records.len() < BATCH
            && let Ok(more) = queue.try_recv()
        {
            records.push(more);
        }
        let (mut writing, mut batch, mut indexes) = (Vec::new(), Vec::new(), Vec::new());
        for record in records.drain(..) {
            if let Some((progress, of)) = record.to_write() {
                writing.push(record);
                batch.push(progress);
                indexes.push(of);
            }
        }
        if batch.is_empty() {
            continue;
        }
        let recorded = store.record_items(&batch).await;
        let answers = match &recorded {
            Ok(recorded) => recorded.iter().copied().map(Some).collect(),
            Err(error) => {
                tracing::warn!(count = batch.len(), error = chain(error), "outcomes of items are waiting for MongoDB");
                vec![None; batch.len()]
            }
        };
        for ((record, of), answer) in writing.iter().zip(indexes).zip(answers) {
            record.wrote(of, answer);
        }
        // Looked at again: more may have gathered meanwhile.
        records = writing;
        if recorded.is_err() {
            pause(PAUSE).await;
        }
    }
}
