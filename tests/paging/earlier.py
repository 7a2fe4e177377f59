"""Pools, trees and tables as a release before arrays pickled them: two texts of salt "a", one of salt "b"."""

from __future__ import annotations

import base64
import pickle
import zlib
from typing import Final

from kvloom.paging import PagePool, PageTable, PrefixTree

POOLS: Final = {
    "lru": (
        "c-o~?OKaOe5Y}6MwQ=+4yLaW1L+^!xds|S0$u)?zH1>)pT4%M&qhM$*$z`DjZU1j)WyNtrpodC`S+w)bd^7XSPwzMPto"
        "Bj6XO{)%=SNGr$jimilJi2V-Z5RkF&>-4TOF?=6(%XKOIe*p#344m*24=bNZ>M0rRvS<ypVZWsc-?3N+}w(|0KGAd48="
        "1$E`gP0FMdgT%1#>+%KOmFl5OysPMl{bvzl{YqFNp*?X<_{*K)GD=$XV=q{#v1~-~{YE;(eNy_pf6Hsd6C=WrPnWaKg="
        "M?6RHl^I%>iTZRToz2mZkNg1WMuw2EDPC)^@zp#Y+xF(jS4&O-gBs(4azkr1Sxy=e05u>T}0U}%Ii?<72Eqqs{IYfe*_"
        "&&#{JHD@Eqv%hF{QuY8-@VRi#%EUIiHQ1##J!cx;dO?0^L9O|AT-6%Dgh-#8~#{sT;xgR8vE_*HBQ^;?PDP1Rs67CI|H"
        "4O3nekjk8+W`^HI1_H8gc-tIKBjUy+h>0H)FRoQDfoln^08xS#_T3>a;L*bh0}=utjXCORMZ&mJqhtXk2)YjKQz7V$+D"
        "}@W2uSg-6m=@OXms>&zc!6l_Jt;+$ye(?A2~(ZODYU))4#Y~8=O5>gseT}?bj&$C9NvRR_0XD6e{*1VjtP3Z3<5n;%=p"
        "}w?3z{ZfB)wxLG<7*xFwzfJ?(BR{j+il9|yk=jke~htoH!abk|RqGp?hiCH7b&!DVu_-{`mHe@eREsjwOuy-hcfpMvT7"
        "LXB#y+;v*0xoK(B(X5p{m~!Selvp"
    ),
    "window": (
        "c-o~?$!gp{5Y?{Pl1#j0&t1Owkb597xiu(e@YM*7R5K+kOLnW}C18jz_N5^Kb^bTil02RmLk>|Rs;R11Tfh3@{N|3)es"
        "b&hJTJ?W{nL1r6|4Qzvdonn9K<U)plh>tqr&Sz`cYEWg{Y1KX12$;KOnsb&a*_w!J^J`krkEnS0G{`cq4ZnMdz^0F6HQ"
        ";m4_VQA;GfbC$W(B=TB!8vM5uiNN>g}oK4NHSi|b&os!#sM{fP46Ow3DAJaaDD}|1n6!l4zV3wyG3dJnx5C{|+(${^?V"
        "c96%%I%G+Zx?8zH=EjhCTE=y-7YNpIKcrkaEK#4h)tB=dk>yMy;!4cjUtdV7f*M$f!ZRJ*`k~tg)edYAE|cMAol^ZJDU"
        "!B=h0K3SL^z`9#qpq=uuVbIv|rrF`qFTr_8}^=Hf2%@O3TSs3i@Wa;Tl7D*Fz4%HBm*q~!&(bf<31k=wZ(b!>?jImmHR"
        "<~bxHD~UAYZ#)GK=~uEgd-H(VA@jmo4kEY|&~lI1XVAzkW&>RvYR+Rm09CLgDqS-_tmGtGK><AOg1Ry1@s-?(S{ZRjNG"
        "o`qh>|xdxVLwrQPMn9Y%=>|{O2d;RQ74ib=i7!Au~hWj}tPt>&ho{RY6MDR@rLuIDrb^2lxR$ZkF+wAofNobK|#qY4=j"
        "-aqFD}PJ{hPh5V8poa?GW>0XpvV5qraJ>I77d4_sB4)v9`R4>#x(wij8V<;+m|2Ibgj`2AW#?piVd`lb{X_pG(98zZCJ"
        "K}-Q;jD&AFoSa4?f(H1ZZ#("
    ),
    "ours": (
        "c-rlp&u`pB6vx-=ANwPrgf@lpvxQRFK%2CoKar3s1yqTV+_Ea_g<!n)Y@W5wI`Mdu6e-YN(j*!QM9h&tfD;!aB(5AdaN"
        ")oSP8>LJ0*OBW-i+PdB~)<WP$b^2ocZkd&CHuO@9P{ay<67D?CpyF$b-GLI7yagSNx@@zcjm&Byle5*Zd`Z4RLSgcJ6M"
        "rWX%hbK|d3VEmma)ek*ssTsj_Ki-JtnJA)|BqP~!|C7$_NmhQ>veY2;$8*RwuHQioMIUg<1P10pQljbY)t2kvp3Aw<2!"
        "_VD?DWh<<QZ3s%xjgjenYF#NTx|C8a!#|yZ{}dh$^Ky33m}Tal=pL1l@<=-IaFj#?X%6hd%4=m*6n<-)d3Tng(<UK$r`"
        "Q*b}=o~U=r%A0u5-YK#Y&7mDcrpje2l6%2cCpkTg2?-rd-!gE-32qpWfiJOqdSVX5iiAbT|E@WNE1G;ZE&(8ELjoN~|r"
        "4?=}X<eM$L<=~tTFcYSj1&5dohnWM945aPpqya-Vl(8qGce#qPvmW)sWZhL8wRMVYwPmwN7QYj7IT0jr%!4dS`XZMTSJ"
        "RNEJbV>z;}N!7%ygOKGTUXAJCJpcZ)9AjASPi2BVT1EN3?K{4y$pFj&w1jHd)OTa?)GkeV+Pya%uZ%>fe;po^HLA2iTj"
        "XgCI-Ny}Whze$njZ(pb&e<ih33zx-rvbbG~5mD?(Ut`-iSKJEy;w$N{TfT_RY3&F!pMX?`n0Z+EzDL6Xr!u}jF$Cfe1u"
        "4>tuWt*vxE7|cBWBY-0_?q&@mG*j)X7CpsmA%ays?{fg3RPlqJin8yaaV!p@$ky!Bjpps@d6&lVv|+W!NAja4s9;7kqn"
        "jCUjH3GvK9ajaB%t4?nbG|P<yfw2``RBhPSq*)x*S5y>%trn0L{{kPiOn@Kp8NBJ)$-X=j)fB45<2UPm6TS|14>T?`}4"
        ";w;~-fBwds-@Lc|#hhLd^8ka9Z$pEb(kTu~nOmtchU3y22uyxvU<&(qZJ_|3DfRNK-U6H`n&)ui&u@d;{|p+vfY*zx3M"
        "UugRB1nlw@&ZY4}2*;{Ql}^EjXiAbzmNK^b(wdv!g}uIffyPlc2{e%pd*W<)I2v!FWurw7jmL!V@!X%=9kGC|MUCI=h2"
        "mh!c@rxtkmKyUz>D)@b)IJLbvx-TE)TZM^ft^ha-vd21+dhyB`H8@;vA+rJ6H4u-(M5L7V)RSbcNA!xyc{qt^p_u5a}M"
        "?X1H%xl5Ci_=~#gTU3}s=zVJO9M<~l@ID{1fG}eC1EJ`|Nqi`)>Zsl=4}nnR6SPIV`CT<0s?~j0-R(>KtM7iARrl%3<("
        "HGh6Ds8Ly{o@0m+bnfMiHABp|r&GUWO-Fugz|AfSJX1Ox;mLjnSlAprpa$&i46WJo|jKr$pCAQ=)65U3Z3aEz2lKtMo1"
        "KtMo1KtMo1KtMo1KtMo1KtMo1K=8kMOQ_2vd&vs#!$s*7Wlk4c@VK-?zB=H#Br+U_b8wNv%QJ1d{yUc{J)I`WGONg%C%"
        "7N;P#4TTrAyGl9IL9Lx2M0lacleJr^n#T4m9wtDtha}SysW5XU51_*9rdd>u-NP<87QMj18E_?vb?#v&@1^%!Uihf%B?"
        "Pw}}0qcjf(Gi)>QGySF+}-Cy3hD7@WJWzVlGEQ{n$=*qfT(&K%BlODmmn}7q*WK~rOoWrAF$fhzWHi!Fpj8$bVRf#Dw?"
        "bDsvKLF|brIP"
    ),
}  # fmt: skip


def load(name: str) -> tuple[PagePool, PrefixTree, PageTable]:
    """One of ``POOLS``; pages have 2 tokens."""
    found: tuple[PagePool, PrefixTree, PageTable] = pickle.loads(  # noqa: S301 (our own)
        zlib.decompress(base64.b85decode(POOLS[name]))
    )
    return found
