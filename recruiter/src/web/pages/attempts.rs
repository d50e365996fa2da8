//! How often somebody tries to log in: so many times from an address, and so many with a name, within a period.

use std::{
    collections::HashMap,
    hash::Hash,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

/// The period.
const PERIOD: Duration = Duration::from_secs(5 * 60);
/// Attempts from one address.
const OF_ADDRESS: u32 = 10;
/// Attempts with one name, from all addresses: more than one address has, so that nobody locks out somebody else alone.
const OF_NAME: u32 = 100;
/// Maximum number of addresses, and of names, that are remembered. A further one makes room of the oldest.
const MOST: usize = 10_000;

/// The attempts of the last minutes.
#[derive(Default)]
pub(super) struct Attempts(Mutex<(Counts<IpAddr>, Counts<[u8; 32]>)>);

type Counts<K> = HashMap<K, (Instant, u32)>;

impl Attempts {
    /// Counts an attempt. `false`: there were too many.
    pub(super) fn begin(&self, from: IpAddr, name: &str) -> bool {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (addresses, names) = &mut *counts;
        count(addresses, network(from)) <= OF_ADDRESS && count(names, Sha256::digest(name).into()) <= OF_NAME
    }

    /// Forgets the attempts of somebody who has logged in.
    pub(super) fn succeed(&self, from: IpAddr, name: &str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.0.remove(&network(from));
        counts.1.remove(&<[u8; 32]>::from(Sha256::digest(name)));
    }
}

fn count<K: Copy + Eq + Hash>(counts: &mut Counts<K>, key: K) -> u32 {
    if !counts.contains_key(&key) && counts.len() >= MOST {
        counts.retain(|_, (since, _)| since.elapsed() < PERIOD);
        if counts.len() >= MOST
            && let Some(oldest) = counts.iter().min_by_key(|(_, (since, _))| *since).map(|(key, _)| *key)
        {
            counts.remove(&oldest);
        }
    }
    let (since, count) = counts.entry(key).or_insert_with(|| (Instant::now(), 0));
    if since.elapsed() >= PERIOD {
        (*since, *count) = (Instant::now(), 0);
    }
    *count += 1;
    *count
}

/// One machine has all addresses of an IPv6 network.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_by_address_and_by_name() {
        let attempts = Attempts::default();
        let from = |n: u8| IpAddr::from([10, 0, 0, n]);
        assert!((0..OF_ADDRESS).all(|_| attempts.begin(from(1), "ada")));
        assert!(!attempts.begin(from(1), "ada") && !attempts.begin(from(1), "bob") && attempts.begin(from(2), "ada"));
        attempts.succeed(from(1), "ada");
        assert!(attempts.begin(from(1), "ada"));
        let mut all = (0..=255).map(|n| attempts.begin(from(n), "eve"));
        assert!(all.by_ref().take(usize::try_from(OF_NAME).unwrap()).all(|may| may) && !all.any(|may| may));
        let same = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, 0, host, 0, 0, 1]);
        assert!((0..20).filter(|host| attempts.begin(same(*host), &host.to_string())).count() == 10, "one network");
    }

    #[test]
    fn no_more_addresses_are_remembered_than_there_is_room_for() {
        let attempts = Attempts::default();
        for n in 0..u32::try_from(MOST).unwrap() + 100 {
            attempts.begin(IpAddr::from(n.to_be_bytes()), &n.to_string());
        }
        let counts = attempts.0.lock().unwrap();
        assert_eq!((counts.0.len(), counts.1.len()), (MOST, MOST));
    }
}
