//! Batches of items that are sent to MongoDB together. A refused batch is halved until it has a single item. The steps of walks.

/// Maximum number of ids in one query. MongoDB does not accept 700,000.
pub(crate) const IDS_PER_QUERY: usize = 10_000;
/// Divides items into batches of at most `most` items and `most_bytes` bytes; a larger item is a batch of its own.
pub fn cut<T>(items: Vec<T>, most: usize, most_bytes: usize, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut batches: Vec<Vec<T>> = Vec::new();
    let mut bytes = 0;
    for item in items {
        let more = size(&item);
        match batches.last_mut() {
            Some(batch) if batch.len() < most && bytes + more <= most_bytes => {
                bytes += more;
                batch.push(item);
            }
            _ => {
                bytes = more;
                batches.push(vec![item]);
            }
        }
    }
    batches
}

/// What one step of a walk over an index has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalkStep<P> {
    /// The number of deleted documents.
    pub deleted: u64,
    /// The position from which the next step goes on; `None` when everything was examined.
    pub next: Option<P>,
}

/// Batches that are still to be sent. Each batch is harmless to send again, because the operations are idempotent.
#[derive(Debug)]
pub(crate) struct Batches<T>(Vec<Vec<T>>);

impl<T> Batches<T> {
    pub(crate) fn new(mut batches: Vec<Vec<T>>) -> Self {
        batches.reverse();
        Self(batches)
    }

    /// The next batch; `None` when all were sent.
    pub(crate) fn next(&mut self) -> Option<Vec<T>> {
        self.0.pop()
    }

    /// Puts both halves of a refused batch in front of all other batches. If the batch has a single item, returns that item, which MongoDB
    /// refuses.
    pub(crate) fn halve(&mut self, mut refused: Vec<T>) -> Option<T> {
        if refused.len() <= 1 {
            return refused.pop();
        }
        let second = refused.split_off(refused.len() / 2);
        self.0.extend([second, refused]);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_cut_by_number_and_bytes() {
        let sizes = |items: &[usize]| cut(items.to_vec(), 3, 10, |bytes| *bytes).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(&[]), Vec::<usize>::new());
        assert_eq!(sizes(&[1; 7]), [3, 3, 1]);
        assert_eq!(sizes(&[5, 5, 5, 11, 1]), [2, 1, 1, 1]);
    }

    #[test]
    fn a_refused_batch_is_halved_until_the_refused_item_is_alone() {
        for bad in 0..7 {
            let mut batches = Batches::new(vec![(0..4).collect(), (4..7).collect()]);
            let (mut sent, mut refused) = (Vec::new(), Vec::new());
            while let Some(batch) = batches.next() {
                if batch.contains(&bad) {
                    refused.extend(batches.halve(batch));
                } else {
                    sent.extend(batch);
                }
            }
            assert_eq!((sent, refused), ((0..7).filter(|item| *item != bad).collect(), vec![bad]), "in order");
        }
    }
}
