//! Who is logged in. In the memory of this process: a restart logs everyone out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{
    HeaderMap,
    header::{COOKIE, HeaderValue},
};
use sha2::{Digest as _, Sha256};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    super::access::{Role, Until},
    visitor::Visitor,
};

/// A session ends after this time.
const LIFETIME: Duration = Duration::from_secs(12 * 60 * 60);
/// Maximum number of sessions, and of those of one person. A further one ends the oldest.
const MOST: usize = 10_000;
const OF_PERSON: usize = 100;
/// The name of the cookie; behind TLS, browsers refuse one of this prefix from other hosts of the domain.
const COOKIE_NAME: &str = "recruiter_session";
const SECURE_NAME: &str = "__Host-recruiter_session";

/// The sessions, by the SHA-256 of what the cookies have.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<[u8; 32], Session>>);

struct Session {
    person: Arc<str>,
    role: Role,
    csrf: Arc<str>,
    begun: Instant,
    /// Cancels its token when the session is removed.
    ended: DropGuard,
}

impl Sessions {
    /// Begins a session, and returns what the cookie has.
    pub(super) fn begin(&self, person: Arc<str>, role: Role) -> String {
        let [secret, csrf] = [(); 2].map(|()| hex::encode(rand::random::<[u8; 32]>()));
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, session| session.begun.elapsed() < LIFETIME);
        let of_person = || sessions.iter().filter(|(_, session)| session.person == person);
        let oldest = if of_person().count() >= OF_PERSON {
            of_person().min_by_key(|(_, session)| session.begun)
        } else {
            sessions.iter().min_by_key(|(_, session)| session.begun).filter(|_| sessions.len() >= MOST)
        };
        if let Some(oldest) = oldest.map(|(key, _)| *key) {
            sessions.remove(&oldest);
        }
        let ended = CancellationToken::new().drop_guard();
        sessions.insert(key(&secret), Session { person, role, csrf: csrf.into(), begun: Instant::now(), ended });
        secret
    }

    /// The session that a request belongs to, and its end.
    pub(super) fn of(&self, headers: &HeaderMap, is_secure: bool) -> Option<(Visitor, Until)> {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = secrets_in(headers, is_secure).find_map(|secret| sessions.get(&key(secret)));
        let Session { person, role, csrf, begun, ended } = found?;
        let left = LIFETIME.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
        let visitor = Visitor { name: Some(person.clone()), role: *role, csrf: csrf.clone(), has_session: true };
        Some((visitor, Until::new(ended.token().clone(), left)))
    }

    /// Ends the session that a request belongs to.
    pub(super) fn end(&self, headers: &HeaderMap, is_secure: bool) {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        secrets_in(headers, is_secure).for_each(|secret| drop(sessions.remove(&key(secret))));
    }
}

/// By its hash: how long the comparison takes says nothing about the secret.
fn key(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

fn name_of_cookie(is_secure: bool) -> &'static str {
    if is_secure { SECURE_NAME } else { COOKIE_NAME }
}

fn secrets_in(headers: &HeaderMap, is_secure: bool) -> impl Iterator<Item = &str> {
    let cookies = headers.get_all(COOKIE).iter().filter_map(|cookies| cookies.to_str().ok()).flat_map(|cookies| cookies.split(';'));
    let pairs = cookies.filter_map(|cookie| cookie.trim().split_once('='));
    pairs.filter(move |(name, _)| *name == name_of_cookie(is_secure)).map(|(_, secret)| secret)
}

/// The cookie of a session; without a secret, one that removes it.
pub(super) fn cookie(secret: Option<&str>, is_secure: bool) -> Option<HeaderValue> {
    let (name, secure) = (name_of_cookie(is_secure), if is_secure { "; Secure" } else { "" });
    let seconds = secret.map_or(0, |_| LIFETIME.as_secs());
    let secret = secret.unwrap_or_default();
    HeaderValue::from_str(&format!("{name}={secret}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(cookie: &str) -> HeaderMap {
        HeaderMap::from_iter([(COOKIE, cookie.parse().unwrap())])
    }

    #[test]
    fn a_session_is_found_by_its_cookie_until_it_ends() {
        let sessions = Sessions::default();
        let secret = sessions.begin("ada".into(), Role::Operator);
        let headers = with(&format!("a=b; {COOKIE_NAME}={secret}"));
        let (visitor, _) = sessions.of(&headers, false).unwrap();
        assert_eq!((visitor.name.as_deref(), visitor.role, visitor.csrf.len()), (Some("ada"), Role::Operator, 64));
        for other in [format!("x{COOKIE_NAME}={secret}"), format!("{COOKIE_NAME}={}", "0".repeat(64)), format!("{COOKIE_NAME}=")] {
            assert!(sessions.of(&with(&other), false).is_none(), "{other}");
        }
        assert!(sessions.of(&headers, true).is_none(), "behind TLS, another host of the domain could set the cookie with this name");
        assert!(sessions.of(&with(&format!("{SECURE_NAME}={secret}")), true).is_some());
        sessions.end(&headers, false);
        assert!(sessions.of(&headers, false).is_none());
    }

    #[tokio::test]
    async fn a_session_ends_when_somebody_logs_out_and_when_its_time_is_over() {
        let sessions = Sessions::default();
        let headers = with(&format!("{COOKIE_NAME}={}", sessions.begin("ada".into(), Role::Viewer)));
        let begun_before =
            |age| sessions.0.lock().unwrap().values_mut().for_each(|session| session.begun = Instant::now().checked_sub(age).unwrap());
        begun_before(LIFETIME);
        assert!(sessions.of(&headers, false).is_none());
        begun_before(LIFETIME - Duration::from_secs(60));
        let (_, until) = sessions.of(&headers, false).unwrap();
        assert!(until.left <= Duration::from_secs(60));
        let ended = tokio::spawn(until.reached());
        sessions.end(&headers, false);
        ended.await.unwrap();
    }

    #[test]
    fn the_oldest_session_makes_room() {
        let sessions = Sessions::default();
        let first = sessions.begin("first".into(), Role::Viewer);
        let all: Vec<String> = (0..=OF_PERSON).map(|_| sessions.begin("often".into(), Role::Viewer)).collect();
        let is_known = |secret: &str| sessions.of(&with(&format!("{COOKIE_NAME}={secret}")), false).is_some();
        assert!(is_known(&first) && !is_known(&all[0]) && is_known(&all[1]), "nobody logs others out by logging in");
        let last = (0..MOST).map(|number| sessions.begin(number.to_string().into(), Role::Viewer)).last().unwrap();
        assert!(!is_known(&first) && is_known(&last) && sessions.0.lock().unwrap().len() == MOST);
    }
}
